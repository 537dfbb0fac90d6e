"""Verifiers: pure functions that compare a completion with its row of the prompts, 1.0 or 0.0."""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron.rollouts.rewards.answers import answer, fenced_block, marked_answer
from megatron.rollouts.rewards.equality import NotRational, Undefined, equal, rational
from megatron.rollouts.rewards.formulas import NoFormula, parse
from megatron.rollouts.rewards.programs import prepare_programs, run_program

Columns = Mapping[str, Any]
Verify = Callable[[str, Columns], float]
_NUMBER = re.compile(
    r"(?<![\w)])-?\\[dtc]?frac\s*\{-?\d+\}\s*\{\d+\}"
    r"|(?:(?<![\w).])[-−])?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?"
)


@dataclass(frozen=True)
class Verifier:
    """columns: one of these fields must be in a row, or there is no reward. prepare: from the limit of a
    completion in seconds, and folders that no program may see, to the function; it raises where the function
    could not work."""

    columns: tuple[str, ...]
    prepare: Callable[[float, Sequence[str]], Verify]


def exact_match(completion: str, columns: Columns) -> float:
    """Is the answer the same text, without white space around it and in Unicode's NFC? Case counts."""
    return float(_text(answer(completion)) == _text(answer(_expected(columns))))


def arithmetic(completion: str, columns: Columns) -> float:
    """Is the answer the same rational number? Raises ValueError where the row's answer is none."""
    expected = _number(_expected(columns))
    if expected is None:
        raise ValueError(f"the row's answer {_expected(columns)[:40]!r} is no number")
    return float(_number(completion) == expected)


def expression(completion: str, columns: Columns) -> float:
    """Is the answer an equal formula, or where one of them is none, the same text but for white space?"""
    found, expected = answer(completion), answer(_expected(columns))
    try:
        same = equal(parse(found), parse(expected))
    except NoFormula:
        same = None
    return float("".join(_text(found).split()) == "".join(_text(expected).split()) if same is None else same)


def json_value(completion: str, columns: Columns) -> float:
    """Is the completion, or its last block of JSON, equal to `answer` and valid by `schema`? A row has one of
    them or both, as JSON or as texts of it."""
    try:
        value = _parsed_json(_whole_or_block(completion, ("json",)))
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
            raise ValueError("the row's tests are neither a text nor a list of texts")
        try:
            compile(tests, "tests", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:  # whatever answers do
            raise ValueError(f"the row's tests are no Python: {problem}") from None
        program = _whole_or_block(completion, ("python", "py", "python3"))
        return float(run_program(program, tests, timeout_s, hidden))

    return code


def _expected(columns: Columns) -> str:
    """The row's answer as text. Raises ValueError for a list or the like."""
    value = columns["answer"]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the row's answer is {type(value).__name__}, neither text nor number")
    return str(value)


def _text(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _number(text: str) -> Fraction | None:
    """The number that the marked answer is, or the text as a whole, else the last number in it."""
    marked = marked_answer(text)
    text = text.strip() if marked is None else marked
    last = [found.group() for found in _NUMBER.finditer(text[-10_000:])][-1:]
    for part in (text, *last):
        try:
            return rational(parse(part), {})
        except Undefined:
            return None
        except (NoFormula, NotRational):
            continue
    return None


def _whole_or_block(text: str, languages: tuple[str, ...]) -> str:
    block = fenced_block(text, languages)
    return text if block is None else block


def _parsed_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not in JSON")

    return json.loads(text, parse_constant=refuse)


def _given_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return _parsed_json(value)
    except (ValueError, RecursionError):
        raise ValueError(f"the row's {column} is a text, but not of JSON") from None


def _same_json(one: Any, other: Any) -> bool:
    """Python has True equal to 1; JSON has not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_json, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_json(one[name], other[name]) for name in one)
    return bool(one == other)


def _ready(verify: Verify) -> Callable[[float, Sequence[str]], Verify]:
    return lambda timeout_s, hidden: verify


VERIFIERS: Mapping[str, Verifier] = {
    "exact_match": Verifier(("answer",), _ready(exact_match)),
    "arithmetic": Verifier(("answer",), _ready(arithmetic)),
    "expression": Verifier(("answer",), _ready(expression)),
    "json": Verifier(("answer", "schema"), _ready(json_value)),
    "code": Verifier(("tests",), _prepare_code),
}
