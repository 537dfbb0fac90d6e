"""Work that a thread of rank 0 directs: operations run on all ranks, problems are raised on all."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import rank0_driver
from megatron.distributed.rank0_driver import RunOperation, run_rank0_driver
from megatron.mpu import ParallelGroups, build_groups
from megatron.neox_arguments import ConfigError
from tests.pool import run_ranks


class OwnError(Exception):
    """An error of a library that other ranks have not imported."""

    def __init__(self, subject: str, detail: str) -> None:  # cannot be unpickled
        super().__init__(f"{subject} {detail}")


def groups_of(world: int) -> ParallelGroups:
    return build_groups(pipe=1, data=world, tensor=1, device=torch.device("cpu"))


def add_up(value: int) -> int:
    assert threading.current_thread() is threading.main_thread()
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return int(total)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ConfigError(["rank 1 cannot do it"])


OPERATIONS = {"add": add_up, "fail": fail_on_one}


def driven(rank: int, world: int) -> tuple[Any, int]:
    """For the pool: the result and how often this rank heard from rank 0."""

    def work(call: RunOperation) -> list[Any]:
        total = call("add", 10)
        try:
            call("fail")
        except ConfigError as problem:
            return [total, call("add", 1), str(problem)]
        return []

    beats: list[int] = []
    return run_rank0_driver(groups_of(world), work, OPERATIONS, on_beat=lambda: beats.append(1)), len(beats)


def driven_to_failure(rank: int, world: int, kind: str) -> str:
    """For the pool: what was raised here."""

    def work(call: RunOperation) -> None:
        call("add", 1)
        raise ConfigError(["bad key"]) if kind == "ours" else OwnError("no", "luck")

    try:
        run_rank0_driver(groups_of(world), work, OPERATIONS)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def driven_in_silence(rank: int, world: int) -> int:
    """For the pool: messages heard while rank 0 is busy, until these are five."""
    rank0_driver.IDLE_S = 0.05
    beats, five_beats = list[int](), threading.Event()

    def on_beat() -> None:
        beats.append(1)
        if len(beats) == 5:
            five_beats.set()

    run_rank0_driver(groups_of(world), lambda call: five_beats.wait(60), {}, on_beat=on_beat)
    return len(beats)


def test_operations_run_on_every_rank_and_who_waits_hears_from_rank_zero():
    (result, beats), (idle_result, idle_beats) = run_ranks(driven, 2)
    assert result == [30, 3, "rank 1 cannot do it"] and idle_result is None
    assert beats == idle_beats == 4, "three calls and the end"
    assert min(run_ranks(driven_in_silence, 2)) > 5, "and the end"


@pytest.mark.parametrize("kind, text", [("ours", "bad key"), ("theirs", "no luck")])
def test_what_the_work_raises_is_raised_everywhere(kind, text):
    problems = run_ranks(driven_to_failure, 2, kind)
    assert all(text in problem for problem in problems)
    names = [problem.split(":")[0] for problem in problems]
    assert names == (["ConfigError"] * 2 if kind == "ours" else ["OwnError", "Rank0Error"])


def test_alone_there_is_neither_thread_nor_wait():
    single, get_thread = ParallelGroups.single(), threading.current_thread
    operations = {"where": get_thread, "fail": lambda: 1 // 0}
    assert set(run_rank0_driver(single, lambda call: [get_thread(), call("where")], operations)) == {get_thread()}
    with pytest.raises(ZeroDivisionError):
        run_rank0_driver(single, lambda call: call("fail"), operations)
