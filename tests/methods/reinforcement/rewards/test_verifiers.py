"""Verifiers: tables of completions, and texts that would hang or deceive them."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from megatron.methods.reinforcement.rewards.equality import equal
from megatron.methods.reinforcement.rewards.formulas import parse
from megatron.methods.reinforcement.rewards.functions import Completion, RewardError, RewardFunctions
from megatron.methods.reinforcement.rewards.verifiers import (
    answer,
    arithmetic,
    exact_match,
    expression,
    fenced_block,
    json_value,
    marked_answer,
)

FRACTION = r"\boxed{\frac{3}{4}}"
LONG = "(" * 400 + "1" + ")" * 400


@pytest.fixture(autouse=True)
def _none_hangs() -> Iterator[None]:
    """Fails a test after a minute: without the verifiers' own limits a test would take hours."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    previous_handler = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous_handler)


def truncated_text(value: Any) -> str:
    return str(value)[:40]


@pytest.mark.parametrize(("text", "marked"), [
    (r"so \boxed{1} and \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
    (r"\boxed{a {b} c} <answer>2</answer> #### 3", "a {b} c"), (r"\boxed{5} then \boxed{6", "5"),
    (r"\boxed{never closed", None), ("<answer> 1 </answer><answer>\n2\n</answer> #### 3", "2"),
    ("#### 3 #### 4\n", "4"), (r"\boxed{}", ""), ("nothing", None), (r"\boxed{\boxed{1}", "1"),
    (r"\boxed{1} }} \boxed{2}", "2"), ("</answer>1<answer>", None), (r"\boxed{" * 10_000, None),
    ("{" * 100_000 + r"\boxed{1}", "1"), ("<answer>" * 10_000, None),
], ids=truncated_text)  # fmt: skip
def test_marked_answers(text: str, marked: str | None) -> None:
    assert marked_answer(text) == marked
    assert answer(text) == (text.strip() if marked is None else marked)


def test_a_formula_without_a_value_equals_none_that_has_one() -> None:
    assert equal(parse("1/0"), parse("5")) is False and equal(parse("x"), parse("x/0")) is False
    assert equal(parse("1/0"), parse("2/0")) is None


@pytest.mark.parametrize(("text", "block"), [
    ("```python\na\n```\ntext\n```py\nb\n```", "b\n"), ("```\na\n```\n```js\nb\n```", "a\n"),
    ("```Python title=x\na\n  ```", "a\n"), ("```python\nnever closed", None), ("none", None),
])  # fmt: skip
def test_fenced_blocks(text: str, block: str | None) -> None:
    assert fenced_block(text, ("python", "py")) == (text if block is None else block)


Verdicts = dict[Callable[..., float | None], list[tuple[str, Any]]]
RIGHT: Verdicts = {  # completions, and the answers of which they are right
    exact_match: [
        (r"It is \boxed{Paris}.", "Paris"), ("  Paris\n", "Paris "), ("<answer>cafe\u0301</answer>", "caf\u00e9"),
        ("#### 7", 7), ("#### 7", "He has 3 + 4 = 7 #### 7"), ("", ""),
    ],
    arithmetic: [
        ("The answer is 42.", "42"), ("It costs $1,234,567.50 in all", "1234567.5"), ("a share of 75%", "3/4"),
        ("#### 75 \\%", 0.75), ("that is 3/4", "0.75"), (FRACTION, "0.75"), (r"which makes \frac{3}{4} of it", "0.75"),
        (r"\boxed{\dfrac34 \text{ cm}}", "0.75"), (r"\boxed{\$12}", "12"), ("<answer>x = -5</answer>", "-5"),
        ("<answer>it is −5 degrees</answer>", "-5"), ("from 10-5 it was", "5"), ("5 + 7 = 12", "5 + 7"),
        ("10", "(2 + 3) * 4 ** 2 / 8"), ("0.5", "2^-1"), ("-4", "-2^2"), ("512", "2^3^2"), ("1.5e3", "1500"),
        ("007", "7"), ("0.3", "0.1 + 0.2"), ("6", r"3 \times 4 \div 2"), ("-1", "(-1)^1000001"), (LONG, "1"),
        (r"-3 \times 10^8", "-300000000"), (r"1.5 \cdot 10^{-2}", "0.015"), ("10^3", "1000"), ("-1/2", "-0.5"),
        ("1+" * 2000 + "1", "1"), ("\u0663", "3"), ("4 #### 5", "5 #### 5"),
    ],
    expression: [
        ("(x + 1)^2", "x^2 + 2x + 1"), (r"\boxed{\frac{x}{2} + \sqrt{2}}", "0.5*x + 2**(1/2)"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"), (r"\sqrt[3]{8}", "2"), ("sin(x)^2 + cos(x)^2", "1"),
        (r"\sin{x} \cdot 2 \cos{x}", "sin(2x)"), ("exp(log(3))", "3"), ("e^x", "exp(x)"), (r"2\pi r", "2*pi*r"),
        ("π/4", "arctan(1)"), ("y = 2x + 3", "2x+3"), ("xy", "y x"), (r"x_{1} + x_2", "x_2 + x_1"),
        (r"\alpha\beta", r"\beta \alpha"), ("sqrt(x^2)", "abs(x)"), ("1/x", "1/x + 1 - 1"), ("1 / 0", "1/0"),
        ("[1, 2)", "[1,2)"), (r"\text{yes}", r"\text{yes}"), ("x " * 290, "x^290"), ("", ""),
    ],
}  # fmt: skip
WRONG: Verdicts = {
    exact_match: [
        (r"It is \boxed{paris}.", "Paris"), ("Paris is it", "Paris"),
    ],
    arithmetic: [
        ("42 apples, not 43", 42), (r"\boxed{75}", "75%"), ("0.333333333333333333333", "1/3"), ("none at all", "7"),
        ("", "7"), ("1/0", "7"), ("0^-1", "0"), ("9**9**9", "9"), ("9**9**9**9", "9"), ("2^(2^100000)", "2"),
        ("1e999999999", "1"), ("-" * 900 + "1", "1"), ("7" * 100_000, "7"), ("__import__('os').system('false')", "0"),
        ("1,2,3", "3"), ("5 + 7", "12"), ("#### 5 + 7", "12"), ("10-5", "5"), ("2^3", "8"),
        (r"\boxed{2 \times 3}", "6"), ("(1 + 1)/2", "1"),
    ],
    expression: [
        ("(x + 1)^2", "x^2 + 1"), ("pi", "3.14159265358979"), ("sqrt(x^2)", "x"),
        ("x + 0.00000000000000000000000000000000000000000000001", "x"), ("x/0", "x"), ("(1, 2)", "(1, 3)"),
        ("x" * 2000, "x"), ("((((x^9)^9)^9)^9)^9^9", "x"), ("exp(exp(exp(exp(exp(9)))))", "x"), ("x^999999999", "x"),
        ("(1+x)^(10^6)", "x"), ("sin(10^900)", "0"), ("9^9^9^9", "9"), ("__import__('os').system('false')", "0"),
        ("(lambda: 1)()", "1"), ("(" * 60 + "1" + ")" * 60, "1"), ("1+" * 200 + "1", "201"), ("", "x"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("reward", "verify", "completion", "expected"), [
    (reward, verify, *row) for reward, verdicts in ((1.0, RIGHT), (0.0, WRONG))
    for verify, rows in verdicts.items() for row in rows
], ids=lambda value: getattr(value, "__name__", truncated_text(value)))  # fmt: skip
def test_verdicts(reward: float, verify: Callable[..., float | None], completion: str, expected: Any) -> None:
    assert verify(completion, {"answer": expected}) == reward


@pytest.mark.parametrize(("completion", "columns", "reward"), [
    ('{"a": [1, 2.0]}', {"answer": '{"a": [1.0, 2]}'}, 1.0),
    ('{"a": 1, "b": 2}', {"answer": {"b": 2, "a": 1}}, 1.0),
    ('so:\n```json\n[1]\n```\nor\n```json\n[2]\n```\n', {"answer": [2]}, 1.0),
    ("[1]", {"answer": [True]}, 0.0),
    ("true", {"answer": True}, 1.0),
    ("[1, 2]", {"answer": [1]}, 0.0),
    ('{"a": 1}', {"answer": {"a": 1, "b": None}}, 0.0),
    ('"text"', {"answer": '"text"'}, 1.0),
    ("{'a': 1}", {"answer": {"a": 1}}, 0.0),
    ("NaN", {"answer": 1}, 0.0),
    ("[" * 100_000, {"answer": 1}, 0.0),
    ("1" * 10_000, {"answer": 1}, 0.0),
    ('{"a": "x"}', {"schema": {"type": "object", "required": ["a"]}}, 1.0),
    ('{"b": "x"}', {"schema": {"type": "object", "required": ["a"]}}, 0.0),
    ('{"a": "x"}', {"schema": '{"required": ["a"]}', "answer": {"a": "y"}}, 0.0),
], ids=truncated_text)  # fmt: skip
def test_json(completion: str, columns: dict[str, Any], reward: float) -> None:
    if "schema" in columns:
        pytest.importorskip("jsonschema")
    assert json_value(completion, columns) == reward


@pytest.mark.parametrize(("name", "answer", "facts"), [
    ("arithmetic", "many", "'many'"), ("exact_match", ["a"], "list"), ("json", "{a", "JSON"),
])  # fmt: skip
def test_a_row_that_cannot_be_compared_with_is_a_failure(name: str, answer: Any, facts: str) -> None:
    rows: list[dict[str, Any]] = [{"answer": answer}, {"answer": None}, {}, {"answer": "1"}]
    with closing(RewardFunctions([name], timeout_s=100)) as functions:
        assert functions.score([Completion("p", "1", [], {"answer": None})]).parts == {name: [None]}
        result = functions.score([Completion("p", "1", [], row) for row in rows])
    assert result.parts == {name: [None, None, None, 1.0]}
    (failure,) = result.failures
    assert failure.row == 0 and failure.reason.startswith("ValueError: ") and facts in failure.reason


@pytest.mark.parametrize(("name", "field"), [
    ("exact_match", "answer"), ("expression", "answer"), ("json", "answer or schema"), ("code", "tests"),
])  # fmt: skip
def test_prompts_without_the_field_are_refused_at_the_start(name: str, field: str) -> None:
    with closing(RewardFunctions([name], timeout_s=100)) as functions:
        with pytest.raises(RewardError, match=f"^{name}: .* field {field}"):
            functions.check(["anwser", "level"])


def test_rows_are_shared_among_workers_in_order() -> None:
    texts = [str(row) for row in range(500)]
    completions = [Completion("p", text, [], {"answer": json.dumps(2 * (row // 2))}) for row, text in enumerate(texts)]
    with closing(RewardFunctions(["arithmetic", "json"], timeout_s=100, workers=3)) as functions:
        result = functions.score(completions)
    assert result.parts == {"arithmetic": [1.0, 0.0] * 250, "json": [1.0, 0.0] * 250} and result.failures == []
