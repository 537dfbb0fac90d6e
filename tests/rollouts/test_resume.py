"""A run that is killed goes on bit for bit, between the steps of a generation too."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pool import run_ranks
from tests.rollouts.test_rollouts import with_keys
from tests.rollouts.toy import whole_run, write_task
from tests.training.runs import bit_equal

KINDS: dict[str, dict[str, Any]] = {
    "moving average": {"rl_loss_type": "reinforce", "kl_div_beta": 0.05},
    "several steps a generation": {
        "rl_loss_type": "dapo", "rollout.num_iterations": 2, "rollout.steps_per_generation": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal(kind: str, tmp_path: Path) -> None:
    """Saved after two steps, killed in the fourth, begun again."""
    task = write_task(tmp_path)
    values = with_keys(task, KINDS[kind], {"train_iters": 6, "checkpoint_factor": 2})
    run, again = ({**values, "save": str(tmp_path / name), "load": str(tmp_path / name)} for name in ("run", "again"))
    whole = run_ranks(whole_run, 1, run)[0]
    run_ranks(whole_run, 1, again, stop_at=3)
    assert sorted(path.name for path in (tmp_path / "again").glob("global_step*")) == ["global_step2"]
    assert bit_equal(run_ranks(whole_run, 1, again)[0], whole)
    one, other = (
        [json.loads(line) for line in (tmp_path / name / "logs" / "rollouts.jsonl").read_text().splitlines()]
        for name in ("run", "again")
    )
    assert [{**row, "run_id": None} for row in other] == [{**row, "run_id": None} for row in one]


def test_without_the_answers_of_its_generation_it_says_where_it_can_go_on(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    values = with_keys(task, KINDS["several steps a generation"], {"train_iters": 6, "checkpoint_factor": 2})
    values = {**values, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_ranks(whole_run, 1, values, stop_at=3)
    (tmp_path / "run" / "logs" / "generations" / "0.json").unlink()
    with pytest.raises(
        AssertionError, match="missing; the run goes on between the steps of a generation.*multiple of 4"
    ):
        run_ranks(whole_run, 1, values)


def test_another_batch_size_or_a_checkpoint_of_texts_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    values = with_keys(task, {"train_iters": 4, "checkpoint_factor": 2})
    values = {**values, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_ranks(whole_run, 1, values, stop_at=3)
    with pytest.raises(AssertionError, match="train_batch_size"):
        run_ranks(whole_run, 1, {**values, "train_batch_size": 8})
    with pytest.raises(AssertionError, match="num_iterations"):
        run_ranks(whole_run, 1, with_keys(values, {"rollout.num_iterations": 2}))
