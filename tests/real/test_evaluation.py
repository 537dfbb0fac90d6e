"""Scores of a model that was really trained, beside those of lm-eval's own `hf` backend, in layouts."""

from pathlib import Path

import pytest

from tests.evaluation.runs import make_tasks, reference, scores
from tests.evaluation.test_harness import assert_same
from tests.pool import run_ranks
from tests.real.runs import LAYOUTS

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
TASKS = ("shipped", "own_text")


def test_as_the_hf_backend_and_far_from_chance(real_model: Path, tmp_path: Path):
    task_folder = make_tasks(tmp_path)
    expected = reference(str(real_model), TASKS, task_folder, limit=12)
    for name, (ranks, changes) in LAYOUTS.items():
        changes = {**changes, "eval_include_path": task_folder, "eval_limit": 12}
        actual = run_ranks(scores, ranks, str(real_model), TASKS, changes, timeout=400)[0]
        assert_same(actual, expected)
        print(name, {metric: round(value, 4) for metric, value in actual.metrics().items()})
    metrics = expected.metrics()
    assert metrics["shipped_choice_acc"] > 0.5 and metrics["shipped_perplexity_byte_perplexity"] < 3.0
