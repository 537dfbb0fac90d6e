"""Text of JSON that every program reads, also of numbers for which JSON has no form."""

import json
import math

import pytest

from megatron.process.metrics_file import JsonlLogger
from megatron.process.run_files import to_json


def strict(text: str) -> object:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null(bad: float, tmp_path) -> None:
    value = {"a": bad, "b": [1.5, (bad, {"c": bad})], "d": "NaN"}
    assert strict(to_json(value)) == {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN"}
    rows = JsonlLogger(tmp_path / "metrics.jsonl", 0, "run")
    rows.write({"iteration": 1, "train/lm_loss": bad, "train/grad_norm": 1e-300})
    rows.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert strict(line) == {"iteration": 1, "train/lm_loss": None, "train/grad_norm": 1e-300, "run_id": "run"}


def test_options_are_those_of_json() -> None:
    assert to_json({"b": math.nan, "a": "ü"}, sort_keys=True, ensure_ascii=False) == '{"a": "ü", "b": null}'
