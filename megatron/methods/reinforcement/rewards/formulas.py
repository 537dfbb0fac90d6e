r"""Parses formulas from texts, without `eval`: Python's operators, some LaTeX, and products without a sign
(2x).

The grammar:
sum = product (("+" | "-") product)*        product = signed (["*" | "/"] signed)*
signed = ("+" | "-") signed | power         power = atom ["^" signed] ["%"]
"""

import re
from dataclasses import dataclass
from fractions import Fraction

FUNCTIONS = ("sqrt", "exp", "log", "ln", "abs", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "asin", "acos",
             "atan", "sinh", "cosh", "tanh")  # fmt: skip
GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi",
         "pi", "rho", "sigma", "tau", "phi", "chi", "psi", "omega")  # fmt: skip
_LENGTH, _TOKENS, _DEPTH = 1000, 300, 50  # limits: characters, tokens, and depth of nesting
_EXPONENT = 1000  # limit for the exponent of a number such as 1e1000
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>\\?[A-Za-z]+(?:_\{\w+\}|_\w)?)"
    r"|(?P<sign>\*\*|[-+*/^%()\[\]]))"
)
_LATEX = (
    (r"\\(?:left|right|displaystyle|,|!|;|:| |quad)|\\?\$|~", " "),
    (r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", " "),  # units
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\(?:cdot|times|ast)(?![A-Za-z])|[×·∗]", "*"),
    (r"\\div(?![A-Za-z])|÷", "/"),
    (r"−", "-"), (r"π", r"\\pi "), (r"√", r"\\sqrt "), (r"\\%", "%"),
    (r"(?<![\d.])(\d{1,3}(?:\{?,\}?\d{3})+)(?!\d|,\d)", lambda match: re.sub(r"\D", "", match[1])),  # 1,234
    (r"^\s*\\?[A-Za-z]+\s*=(?!=)", " "),  # x = 5
)  # fmt: skip


class NoFormula(ValueError):
    """Raised if a text is not a formula, or exceeds the size limits; the message says why."""


@dataclass(frozen=True)
class Formula:
    """A node of a parsed formula: a number, a name, or an operation on other formulas (`parts`).

    operation: one of `+ - * / ^`, a function's name, "number" or "name".
    """

    operation: str
    parts: tuple["Formula", ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""

    def names(self) -> set[str]:
        """Returns all names of variables in the formula, without pi and e."""
        own_names = {self.name} - {"", "pi", "e"}
        return own_names.union(*(part.names() for part in self.parts))


def parse(text: str) -> Formula:
    """Parses a text, plain or LaTeX, as a formula. Raises NoFormula if it is none."""
    if len(text) > _LENGTH:
        raise NoFormula(f"the text is longer than {_LENGTH} characters")
    for pattern, replacement in _LATEX:
        text = re.sub(pattern, replacement, text)
    tokens = _tokens(text.strip().rstrip(".").replace("{", "(").replace("}", ")"))
    if len(tokens) > _TOKENS:
        raise NoFormula(f"the text has more than {_TOKENS} numbers, names and signs")
    parser = _Parser(tokens)
    formula = parser.sum()
    if parser.place < len(tokens):
        raise NoFormula(f"unexpected {tokens[parser.place][1]!r} after a complete formula")
    return formula


def is_number(formula: Formula) -> bool:
    """Returns whether a formula is a number as one writes it, and not a calculation.

    It may have a sign, be a fraction or a percentage, or end in a power of ten.
    """
    left, right = (*formula.parts, None, None)[:2]
    if formula.operation == "number":
        return True
    if left is None or right is None:
        return False
    if formula.operation == "-":  # as the parser has a sign
        return left == Formula("number") and is_number(right)
    if formula.operation == "^":
        return left == Formula("number", number=Fraction(10)) and is_number(right)
    if formula.operation == "*":
        return is_number(left) and right.operation == "^" and is_number(right)
    return formula.operation == "/" and is_number(left) and right.operation == "number"


def _tokens(text: str) -> list[tuple[str, str]]:
    # The braces of x_{1} are parentheses by now.
    text = re.sub(r"_\((\w+)\)", r"_{\1}", text)
    tokens: list[tuple[str, str]] = []
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None or token.lastgroup is None:
            raise NoFormula(f"unexpected characters {text[place : place + 10]!r}")
        kind, value = token.lastgroup, token[token.lastgroup]
        tokens += _letters(value) if kind == "name" else [(kind, "^" if value == "**" else value)]
        place = token.end()
    return tokens


def _letters(name: str) -> list[tuple[str, str]]:
    """Splits a name into tokens: xy becomes x and y, a product. Greek letters and names of over 3 letters
    stay whole."""
    bare_name = re.sub(r"[\\{}]", "", name)
    if name[0] == "\\" or bare_name in (*FUNCTIONS, *GREEK) or "_" in bare_name or len(bare_name) > 3:
        return [("name", bare_name)]
    return [("name", letter) for letter in bare_name]


class _Parser:
    """Parses tokens `(kind, text)` by recursive descent."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def sum(self) -> Formula:
        left = self._product()
        while (sign := self._sign("+-")) is not None:
            left = Formula(sign, (left, self._product()))
        return left

    def _product(self) -> Formula:
        left = self._signed()
        while True:
            sign = self._sign("*/")
            if sign is None and not (self._peek("name") or self._peek("sign", "(")):
                return left
            left = Formula(sign or "*", (left, self._signed()))

    def _signed(self) -> Formula:
        self.depth += 1  # every recursion of the parser goes through this method
        if self.depth > _DEPTH:
            raise NoFormula(f"brackets, signs or powers are nested more than {_DEPTH} deep")
        sign = self._sign("+-")
        formula = self._power() if sign is None else self._signed()
        self.depth -= 1
        return Formula("-", (Formula("number"), formula)) if sign == "-" else formula

    def _power(self) -> Formula:
        base = self._atom()
        if self._sign("^"):
            base = Formula("^", (base, self._signed()))
        if self._sign("%"):
            base = Formula("/", (base, Formula("number", number=Fraction(100))))
        return base

    def _atom(self) -> Formula:
        kind, text = self.tokens[self.place] if self.place < len(self.tokens) else ("end", "the end")
        self.place += 1
        if kind == "number":
            if abs(int(re.split("[eE]", text)[1] if re.search("[eE]", text) else 0)) > _EXPONENT:
                raise NoFormula(f"the exponent of the number {text} is too large")
            return Formula("number", number=Fraction(text))
        if (kind, text) == ("sign", "("):
            return self._closed(")")
        if kind == "name" and text == "frac":
            return Formula("/", (self._atom(), self._atom()))
        if kind == "name" and text == "sqrt" and self._sign("["):
            root = self._closed("]")
            return Formula("^", (self._atom(), Formula("/", (Formula("number", number=Fraction(1)), root))))
        if kind == "name" and text in FUNCTIONS:
            return Formula(text, (self._atom() if self._peek("sign", "(") else self._signed(),))
        if kind == "name":
            return Formula("name", name=text)
        raise NoFormula(f"unexpected {text!r}, where a number, a name or a bracket should begin")

    def _closed(self, bracket: str) -> Formula:
        formula = self.sum()
        if not self._sign(bracket):
            raise NoFormula(f"the closing bracket {bracket!r} is missing")
        return formula

    def _peek(self, kind: str, text: str | None = None) -> bool:
        if self.place >= len(self.tokens):
            return False
        token_kind, value = self.tokens[self.place]
        return token_kind == kind and text in (None, value)

    def _sign(self, signs: str) -> str | None:
        """Returns the next token and advances, if it is one of `signs`; else returns None."""
        if self._peek("sign") and self.tokens[self.place][1] in signs:
            self.place += 1
            return self.tokens[self.place - 1][1]
        return None
