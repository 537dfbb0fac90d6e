"""Built-in verifiers: they compare a completion with its prompt row, and return 1.0 if it is right, else
0.0."""

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron.methods.reinforcement.rewards.equality import NotRational, Undefined, equal, rational
from megatron.methods.reinforcement.rewards.formulas import Formula, NoFormula, is_number, parse
from megatron.methods.reinforcement.rewards.programs import prepare_programs, run_program

Columns = Mapping[str, Any]
Verify = Callable[[str, Columns], float]
_NUMBER = re.compile(
    r"(?<![\w)])-?\\[dtc]?frac\s*\{-?\d+\}\s*\{\d+\}"
    r"|(?:(?<![\w).])[-−])?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?"
)
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Verifier:
    """A built-in verifier.

    columns: fields of prompt rows that it reads; a row with none of them gets no reward.
    prepare: function of (seconds per completion, hidden folders) that returns the verifying function. It
        raises an exception if the verifier cannot work on this machine.
    """

    columns: tuple[str, ...]
    prepare: Callable[[float, Sequence[str]], Verify]


def exact_match(completion: str, columns: Columns) -> float:
    """Returns 1 if the completion's answer is the row's `answer` as text, else 0.

    Outer white space is ignored, case is not. Both are normalised to Unicode NFC.
    """
    return float(_text(answer(completion)) == _text(answer(_expected(columns))))


def arithmetic(completion: str, columns: Columns) -> float:
    """Returns 1 if the completion's answer equals the row's `answer` as a rational number, else 0.

    A calculation such as 5 + 7 is no answer: a model would learn to repeat the question's. Raises ValueError
    if the row's answer is neither a number nor a calculation.
    """
    expected = _number(_expected(columns))
    if expected is None:
        raise ValueError(f"the prompt row's field answer is {_expected(columns)[:40]!r}, which is not a number")
    return float(_number(completion, is_number) == expected)


def expression(completion: str, columns: Columns) -> float:
    """Returns 1 if the completion's answer equals the row's `answer` as a formula, else 0.

    If one of them is not a formula, they are compared as texts without white space.
    """
    actual, expected = answer(completion), answer(_expected(columns))
    try:
        is_equal = equal(parse(actual), parse(expected))
    except NoFormula:
        is_equal = None
    return float("".join(_text(actual).split()) == "".join(_text(expected).split()) if is_equal is None else is_equal)


def json_value(completion: str, columns: Columns) -> float:
    """Returns 1 if the completion's JSON equals the row's `answer` and is valid by its `schema`, else 0.

    A row may have only one of these two fields, as a JSON value or as text. The completion's JSON is the last
    fenced JSON block in it, or its full text if there is none.
    """
    try:
        value = _parsed_json(fenced_block(completion, ("json",)))
    except (ValueError, RecursionError):
        return 0.0
    expected, schema = columns.get("answer"), columns.get("schema")
    if expected is not None and not _same_json(value, _given_json(expected, "answer")):
        return 0.0
    if schema is not None:
        from jsonschema import Draft202012Validator, validators  # optional; its absence is found before

        schema = _given_json(schema, "schema")
        return float(validators.validator_for(schema, default=Draft202012Validator)(schema).is_valid(value))
    return 1.0


def _prepare_code(timeout_s: float, hidden: Sequence[str]) -> Verify:
    prepare_programs(hidden)

    def code(completion: str, columns: Columns) -> float:
        tests = columns["tests"]
        tests = "\n".join(tests) if isinstance(tests, list) else tests
        if not isinstance(tests, str):
            raise ValueError("the prompt row's field tests must be a text or a list of texts")
        try:
            compile(tests, "tests", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:  # all that compile raises
            raise ValueError(f"the prompt row's field tests is not valid Python: {problem}") from None
        program = fenced_block(completion, ("python", "py", "python3"))
        return float(run_program(program, tests, timeout_s, hidden))

    return code


def marked_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` in a text, else that of the last `<answer>...</answer>`.

    Without these it returns the text after the last `####`; None if there is no mark at all.
    """
    if (boxed := _boxed(text)) is not None:
        return boxed.strip()
    if (tagged := _tagged(text)) is not None:
        return tagged.strip()
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def answer(text: str) -> str:
    """Returns the answer in a completion: the marked one (`marked_answer`), or the full text if none is
    marked."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def fenced_block(text: str, languages: Collection[str]) -> str:
    """Returns the content of the last code block fenced by ``` in one of these languages, or without a
    language.

    Returns the full text if there is no such block.
    """
    blocks = [content for language, content in _FENCE.findall(text) if language.lower() in {"", *languages}]
    return blocks[-1] if blocks else text


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    """Returns the content of the closed `\\boxed{...}` that opens last; None if there is none."""
    last, content, opened = -1, None, []
    for brace in re.finditer(r"(\\boxed)?\{|\}", text):
        if brace.group() != "}":
            opened.append((brace.end(), brace[1] is not None))
        elif opened:
            start, is_box = opened.pop()
            if is_box and start > last:
                last, content = start, text[start : brace.start()]
    return content


def _expected(columns: Columns) -> str:
    """Returns the row's `answer` as text. Raises ValueError unless it is a text or a number."""
    value = columns["answer"]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the prompt row's field answer must be a text or a number, not {type(value).__name__}")
    return str(value)


def _text(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _number(text: str, accepts: Callable[[Formula], bool] = lambda formula: True) -> Fraction | None:
    """Converts the marked answer in a text, or the full text, to a number.

    If it is not a number as a whole, its last number is taken. None if it has none, or if `accepts` is false
    for it.
    """
    text = answer(text)
    last = [match.group() for match in _NUMBER.finditer(text[-10_000:])][-1:]
    for part in (text, *last):
        try:
            formula = parse(part)
            value = rational(formula, {})
            return value if accepts(formula) else None
        except Undefined:
            return None
        except (NoFormula, NotRational):
            continue
    return None


def _parsed_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"the JSON contains {constant}, which is not valid JSON")

    return json.loads(text, parse_constant=refuse)


def _given_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return _parsed_json(value)
    except (ValueError, RecursionError):
        raise ValueError(f"the prompt row's field {column} is a text, but not valid JSON") from None


def _same_json(value: Any, expected: Any) -> bool:
    """Returns whether two JSON values are equal. Unlike in Python, true does not equal 1."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_json, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_json(value[name], expected[name]) for name in value)
    return bool(value == expected)


def _ready(verify: Verify) -> Callable[[float, Sequence[str]], Verify]:
    return lambda timeout_s, hidden: verify


VERIFIERS: Mapping[str, Verifier] = {
    "exact_match": Verifier(("answer",), _ready(exact_match)),
    "arithmetic": Verifier(("answer",), _ready(arithmetic)),
    "expression": Verifier(("answer",), _ready(expression)),
    "json": Verifier(("answer", "schema"), _ready(json_value)),
    "code": Verifier(("tests",), _prepare_code),
}
