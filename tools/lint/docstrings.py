"""Checks the first sentences of docstrings: at most 25 words, and not a sentence fragment."""

import ast
from collections.abc import Iterator

from tools.lint.finding import Finding
from tools.lint.sentences import sentences, words_of

MOST_WORDS = 25
# A sentence that begins with one of these words has no subject, or its subject is named elsewhere.
FRAGMENT_STARTS = frozenset(
    "what that which whose whom who where of beside besides so because than but and or nor though although since "
    "until them their they it its those these ours theirs ones others".split()
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_DESCRIBED = (*_DOCUMENTED, ast.Assign, ast.AnnAssign)


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each docstring below an AST node: of modules, classes, functions and fields."""
    for block in ("body", "orelse", "finalbody", "handlers"):
        statement_above: ast.AST | None = node if isinstance(node, _DOCUMENTED) else None
        for statement in getattr(node, block, ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if isinstance(statement_above, _DESCRIBED):
                    yield statement.lineno, text
                case _:
                    yield from docstrings(statement)
            statement_above = statement


def broken_rule(docstring: str) -> str | None:
    """Returns which rule the first sentence of a docstring breaks, such as `begins with What`; None if it
    breaks none."""
    first_sentence = next(iter(sentences(docstring.strip().split("\n\n")[0])), "")
    words = words_of(first_sentence)
    if words and words[0].lower() in FRAGMENT_STARTS:
        return f"begins with {words[0]}"
    return f"first sentence of {len(words)} words" if len(words) > MOST_WORDS else None


def check_docstrings(path: str, tree: ast.AST) -> tuple[int, list[Finding]]:
    """Returns (number of docstrings in a parsed file, findings sorted by line). path: the file, for
    findings."""
    texts = sorted(docstrings(tree))
    broken = [(line, text, rule) for line, text in texts if (rule := broken_rule(text))]
    return len(texts), [Finding(path, line, " ".join(text.split()[:8]) + " ...", rule) for line, text, rule in broken]
