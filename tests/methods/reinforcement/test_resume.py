"""A run that is killed goes on bit for bit, between the steps of a generation too."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.generation import stopping
from megatron.training import train
from tests.methods.reinforcement.toy import full_run, lines_of, started_run, with_keys, write_task
from tests.pool import run_ranks
from tests.training.runs import bit_equal

KINDS: dict[str, dict[str, Any]] = {
    "moving average": {"rl_loss_type": "reinforce", "kl_div_beta": 0.05},
    "several steps a generation": {
        "rl_loss_type": "dapo", "rollout.num_iterations": 2, "rollout.steps_per_generation": 2,
    },
    "conversations": {
        "rl_loss_type": "grpo", "rollout.num_iterations": 2, "rollout.steps_per_generation": 2,
        "rollout.max_completion_length": 12, "rollout.environment": "environments.py:Sums",
    },
}  # fmt: skip


def task_of_kind(kind: str, folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    values = with_keys(write_task(folder), KINDS[kind], keys)
    if "environment" in values["rollout"]:
        values["rollout"]["environment"] = str(folder / values["rollout"]["environment"])
    return values


def stopped(values: dict[str, Any]) -> None:
    """Ended in the fourth step."""
    run_ranks(full_run, 1, values, stop_at=3)
    last = 3 - 3 % values["checkpoint_factor"]
    assert (Path(values["save"]) / "latest").read_text() == f"global_step{last}"


def goes_on_bit_for_bit(values: dict[str, Any], folder: Path, broken_off: Callable[[dict[str, Any]], None] = stopped,
                        ranks: int = 1) -> None:  # fmt: skip
    """A whole run in `folder / "run"`; one in `folder / "again"`, broken off and begun again, is the same."""
    run, resumed = ({**values, "save": str(folder / name), "load": str(folder / name)} for name in ("run", "again"))
    broken_off(resumed)
    full_weights = run_ranks(full_run, ranks, run)
    assert all(map(bit_equal, run_ranks(full_run, ranks, resumed), full_weights))
    lines, resumed_lines = ([{**line, "run_id": None} for line in lines_of(folder / name)] for name in ("run", "again"))
    assert lines == resumed_lines


@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal(kind: str, tmp_path: Path) -> None:
    goes_on_bit_for_bit(task_of_kind(kind, tmp_path, {"train_iters": 6, "checkpoint_factor": 2}), tmp_path)
    generations = sorted(path.stem for path in (tmp_path / "run" / "logs").glob("generations/*.json"))
    assert generations == ([] if kind == "moving average" else ["0", "1"]), "saved after the second step of four"


def test_generations_without_a_checkpoint_go(tmp_path: Path) -> None:
    keys = {"train_iters": 6, "rollout.num_iterations": 2, "rl_loss_type": "grpo", "checkpoint_factor": 5}
    run_ranks(full_run, 1, with_keys(write_task(tmp_path), keys, {"save": str(tmp_path / "run")}))
    assert [path.stem for path in (tmp_path / "run" / "logs").glob("generations/*.json")] == ["2"]


def signalled_while_it_answers(rank: int, world_size: int, values: dict[str, Any], signal_step: int,
                               number: signal.Signals = signal.SIGTERM, looks: int = 1) -> list[int]:  # fmt: skip
    """For the pool: the last rank of a run gets a signal as it begins to answer after `signal_step` steps.

    Returns the lengths of that generation's answers when sampling ended. looks: after how many tokens it
    looks for signals.
    """
    stopping.LOOKS = looks
    with started_run(values) as (training, rollouts):
        sample, lengths = rollouts.sampler, list[int]()

        def signalled(requests: Any) -> Any:
            if training.iteration != signal_step:
                return sample(requests)
            if rank == world_size - 1:
                os.kill(os.getpid(), number)
            answers = sample(requests)
            lengths.extend(len(answer.tokens) for batch in answers for answer in batch)
            return answers

        rollouts.sampler = signalled  # type: ignore[assignment]
        train(training)
    return lengths


@pytest.mark.parametrize("layout", [
    {"pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 4},
    {"dp": 2},
    pytest.param({}, marks=pytest.mark.product),
    pytest.param({"zero_optimization": {"stage": 3}}, marks=pytest.mark.product),
    pytest.param({"rollout.exact": True}, marks=pytest.mark.product),
], ids=["pp2", "dp2", "alone", "zero3", "exact"])  # fmt: skip
def test_a_signal_ends_sampling_at_once(layout: dict[str, Any], tmp_path: Path) -> None:
    """Nothing of the generation is kept, no step is taken any more; the next start goes on bit for bit."""
    task, ranks = write_task(tmp_path), 2 if layout else 1
    keys = {key: value for key, value in layout.items() if key != "dp"}
    values = with_keys(task, {"train_iters": 4, "checkpoint_factor": 100}, keys)

    def signalled(resumed_values: dict[str, Any]) -> None:
        lengths = run_ranks(signalled_while_it_answers, ranks, resumed_values, 2)
        assert sum(lengths[-1]) <= 1 and (sum(lengths[0]) > 8) == ("dp" in layout), "a data rank finishes its own"
        status = json.loads((tmp_path / "again" / "status.json").read_text())
        assert (status["status"], status["iteration"], status["reason"]) == ("stopped", 2, "signal SIGTERM")
        assert [path.name for path in (tmp_path / "again").glob("global_step*")] == ["global_step2"]

    goes_on_bit_for_bit(values, tmp_path, signalled, ranks)


def test_it_looks_for_signals_while_answers_are_short(tmp_path: Path) -> None:
    values = {"train_iters": 1, "train_batch_size": 128, "checkpoint_factor": 9, "save": str(tmp_path / "run")}
    task_values = with_keys(write_task(tmp_path), values)
    (lengths,) = run_ranks(signalled_while_it_answers, 1, task_values, 0, looks=stopping.LOOKS)
    assert len(lengths) == 128 and 128 < sum(lengths) <= stopping.LOOKS


def killed_in_a_step(rank: int, world_size: int, values: dict[str, Any], kill_step: int) -> None:
    """For the pool: a run that ends by SIGKILL in the middle of its step after `kill_step` steps."""
    with started_run(values) as (training, rollouts):
        step = training.engine.train_step

        def killed(*arguments: Any) -> Any:
            if training.iteration == kill_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        training.engine.train_step = killed  # type: ignore[assignment, method-assign]
        train(training)


@pytest.mark.ends_processes
@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_moment_it_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """SIGKILL twice, in a step and in sampling: nothing is put in order, and saves may be half written."""
    values = task_of_kind(kind, tmp_path, {"train_iters": 10, "checkpoint_factor": 2})

    def killed(resumed_values: dict[str, Any]) -> None:
        for breaks, *arguments in ((killed_in_a_step, 5), (signalled_while_it_answers, 8, signal.SIGKILL)):
            with pytest.raises(AssertionError, match="SIGKILL|signal 9|-9"):
                run_ranks(breaks, 1, resumed_values, *arguments)

    goes_on_bit_for_bit(values, tmp_path, killed)


def test_without_the_answers_of_its_generation_it_says_where_it_can_go_on(tmp_path: Path) -> None:
    """The run continues nowhere with another batch size, or with answers that are used more often."""
    task = write_task(tmp_path)
    values = with_keys(task, KINDS["several steps a generation"], {"train_iters": 6, "checkpoint_factor": 2})
    values = {**values, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_ranks(full_run, 1, values, stop_at=3)
    for key, value in (("train_batch_size", 8), ("rollout.num_iterations", 3)):
        with pytest.raises(AssertionError, match=key.removeprefix("rollout.")):
            run_ranks(full_run, 1, with_keys(values, {key: value}))
    (tmp_path / "run" / "logs" / "generations" / "0.json").unlink()
    with pytest.raises(AssertionError, match="0.json.* missing.* multiple of 4"):
        run_ranks(full_run, 1, values)
