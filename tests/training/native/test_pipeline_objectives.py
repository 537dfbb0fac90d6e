"""Every kind of training under every kind of pipeline schedule: five steps equal those of one process."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.methods.distillation.runs import LABELLED
from tests.methods.preferences.test_reference import preferences
from tests.methods.reinforcement.toy import assert_same_steps, steps_of, with_keys, write_task
from tests.methods.reward.test_runs import reward_data, values_of
from tests.methods.unlearning.test_runs import DIFFERENCE
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, Curve, assert_alike, cells, config, curves_of

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = ("megatron.methods",)
STEPS = 5
DEEP = {"num_layers": 4}
ANSWERS = {"pack_impl": "unpacked", "dpo_reference": "on_the_fly"}


def objectives(folder: Path) -> dict[str, dict[str, Any]]:
    small = {**DEEP, "train_micro_batch_size_per_gpu": 2}
    return {
        "sft": config(LLAMA, ADAMW, LABELLED, small),
        "dpo": preferences(folder, ANSWERS, small, train_micro_batch_size_per_gpu=1),
        "kto": preferences(folder, ANSWERS, small, train_impl="kto"),
        "gradient difference": config(LLAMA, ADAMW, DIFFERENCE, small),
        "reward": values_of(reward_data(folder), {"pack_impl": "unpacked"}, small, train_micro_batch_size_per_gpu=1),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return objectives(tmp_path_factory.mktemp("objectives"))


@pytest.fixture(scope="module")
def one_process(runs: dict[str, dict[str, Any]]) -> dict[str, Curve]:
    return curves_of(runs, STEPS)


@pytest.mark.parametrize("schedule", cells([], ["zbv"], ["1f1b", "interleaved"]))
def test_objectives_equal_one_process(
    schedule: str, runs: dict[str, dict[str, Any]], one_process: dict[str, Curve]
) -> None:
    layout = {"pipe_parallel_size": 2, "pipeline_schedule": schedule, "engine": "native"}
    curves = curves_of({name: {**values, **layout} for name, values in runs.items()}, STEPS, 2)
    assert_alike(curves, one_process)
    assert curves["dpo"].losses[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.product
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_group_relative_steps_equal_one_process(schedule: str, tmp_path: Path) -> None:
    """Answers are sampled by the stages of the run, with their caches."""
    task = with_keys(write_task(tmp_path), {**DEEP, "rl_loss_type": "grpo", "kl_div_beta": 0.05, "kl_impl": "k3"})
    layout = {"pipe_parallel_size": 2, "pipeline_schedule": schedule, "train_micro_batch_size_per_gpu": 4}
    expected = run_ranks(steps_of, 1, task, STEPS)[0]
    assert_same_steps(run_ranks(steps_of, 2, with_keys(task, layout), STEPS)[0], expected)
