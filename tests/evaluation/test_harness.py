"""Scores equal those of lm-eval's own `hf` backend, in every layout."""

from typing import Any

import pytest

from megatron.evaluation.results import EvaluationResults
from tests.evaluation.runs import LAYOUTS, answers, make_model, make_tasks, reference, scores
from tests.marks import with_more
from tests.pool import run_ranks

TASKS = ("shipped_choice", "shipped_cloze", "shipped_perplexity", "own_group", "own_text")
CLOSE = 1e-4


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[str, str]:
    return make_model(tmp_path_factory.mktemp("model")), make_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def expected(place) -> EvaluationResults:
    return reference(place[0], TASKS, place[1])


def assert_same(actual: EvaluationResults | None, expected: EvaluationResults) -> None:
    """Metrics and answers, text exactly."""
    assert actual is not None and actual.failures == {}
    expected_metrics = {name: value for name, value in expected.metrics().items() if "_stderr" not in name}
    assert actual.metrics() == pytest.approx(expected_metrics, rel=CLOSE, abs=CLOSE)
    actual_answers, expected_answers = answers(actual), answers(expected)
    assert actual_answers.keys() == expected_answers.keys()
    for place, answer in expected_answers.items():
        if isinstance(answer[0], str):
            assert actual_answers[place] == answer, place
        else:
            assert flat(actual_answers[place]) == pytest.approx(flat(answer), rel=CLOSE, abs=CLOSE), place


def flat(values: list[Any]) -> list[float]:
    return [part for answer in values for part in (answer if isinstance(answer, tuple | list) else [answer])]


@pytest.mark.parametrize("layout", with_more(LAYOUTS, product=["one process", "tp2", "pp2"]))
def test_as_the_hf_backend_in_every_layout(layout, place, expected):
    ranks, changes = LAYOUTS[layout]
    changes = {**changes, "eval_include_path": place[1]}
    results = run_ranks(scores, ranks, place[0], TASKS, changes, timeout=600)
    assert results[1:] == [None] * (ranks - 1), "rank 0 alone has them"
    assert_same(results[0], expected)
    assert results[0].results["groups"]["own_group"]["acc,none"] == expected.results["groups"]["own_group"]["acc,none"]


def test_a_tokenizer_that_begins_texts_and_a_conversation(tmp_path):
    """BOS before texts that have none; the template and what the system says; examples as turns."""
    folder, tasks_folder = make_model(tmp_path, bos=True), make_tasks(tmp_path)
    tasks = ("own_choice", "own_text", "shipped_perplexity")
    settings: dict[str, Any] = {"apply_chat_template": True, "system_instruction": "Be brief.", "num_fewshot": 2}
    reference_results = reference(folder, tasks, tasks_folder, limit=5, **settings)
    changes = {"eval_include_path": [tasks_folder], "eval_limit": 5, "eval_apply_chat_template": True,
               "eval_system_prompt": "Be brief.", "eval_num_fewshot": 2, "eval_batch_size": 3}  # fmt: skip
    assert_same(run_ranks(scores, 1, folder, tasks, changes, timeout=600)[0], reference_results)
