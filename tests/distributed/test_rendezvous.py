"""Ranks that meet, and what is said when some do not come."""

import logging
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.distributed import store
from megatron.distributed.rendezvous import Rendezvous, StartError, named
from megatron.launch import process_info
from tests.pool import run_ranks

QUIET = logging.getLogger("tests.quiet")
HOST = socket.gethostname()


def finish(rendezvous: Rendezvous, rank: int) -> None:
    if rank == 0:
        rendezvous.release(timedelta(seconds=5))
        time.sleep(0.2)  # rank 0 has the store
    else:
        rendezvous.answer_until_released(lambda question: None)


def meet(
    rank: int,
    world_size: int,
    timeout_s: float,
    after: dict[int, float],
    number: dict[int, int],
    port: int | None = None,
) -> tuple[str, float]:
    """What a rank is told, and after how long. after: seconds by process, those left out do not come; number:
    ranks of processes where they are not their own."""
    process = replace(process_info(), rank=number.get(rank, rank))
    if rank not in after:
        return "absent", 0.0
    time.sleep(after[rank])
    begun = time.monotonic()
    try:
        rendezvous = Rendezvous(replace(process, master_port=port or process.master_port), timeout_s, QUIET)
        rendezvous.arrive({})
        finish(rendezvous, rank)
        return "met", time.monotonic() - begun
    except StartError as problem:
        return str(problem), time.monotonic() - begun


def test_missing_ranks_are_named_to_all_that_came() -> None:
    outcomes = run_ranks(meet, 5, 1.0, {0: 0.0, 1: 0.2, 3: 0.0}, {}, init=False)
    assert outcomes[2][0] == outcomes[4][0] == "absent"
    text, seconds = outcomes[0]
    assert "ranks 2, 4 of 5 did not come to 127.0.0.1:" in text
    assert f"(there: ranks 0-1, 3 (host {HOST})) within 1 s of the latest arrival (rendezvous_timeout_s)" in text
    assert outcomes[1][0] == outcomes[3][0] == text, "told by rank 0, not cut off by its end"
    assert 1.0 <= seconds < 5


def test_each_arrival_gives_the_next_rank_its_time() -> None:
    """The last rank comes later than the time-out allows for one."""
    outcomes = run_ranks(meet, 3, 1.5, {0: 0.0, 1: 1.2, 2: 2.4}, {}, init=False)
    assert [text for text, _ in outcomes] == ["met"] * 3
    assert outcomes[0][1] > 2


def test_rank_zero_that_does_not_answer_is_named_by_address() -> None:
    text, seconds = run_ranks(meet, 2, 0.5, {1: 0.0}, {}, init=False)[1]
    assert f"rank 1 (host {HOST}) gets no answer from rank 0 at 127.0.0.1:" in text and "Connection refused" in text
    assert 0.5 <= seconds < 4


def test_a_stranger_at_the_port_is_told_from_a_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        outcomes = run_ranks(meet, 2, 0.5, {0: 0.0, 1: 0.0}, {}, port, init=False)
    assert f"port {port} of host {HOST} is taken" in outcomes[0][0]
    assert (
        "no answer from rank 0" in outcomes[1][0]
        and "something that is no run of this program answers" in outcomes[1][0]
    )
    assert outcomes[1][1] < 6, "torch alone would wait for ever"


def test_two_processes_of_one_rank() -> None:
    outcomes = [text for text, _ in run_ranks(meet, 3, 1.0, {0: 0.0, 1: 0.0, 2: 0.3}, {2: 1}, init=False)]
    assert "rank 1 (host" in outcomes[2] and "is already at 127.0.0.1:" in outcomes[2]
    assert "rank 2 of 3 did not come" in outcomes[0]


def waiting_lines(rank: int, world_size: int) -> list[str]:
    store.REMIND_EVERY_S = 0.1
    lines: list[str] = []
    logger = logging.getLogger("tests.waiting")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    time.sleep(1.3 * rank)
    rendezvous = Rendezvous(process_info(), 5.0, logger)
    rendezvous.arrive({})
    finish(rendezvous, rank)
    return lines


def test_rank_zero_says_whom_it_waits_for() -> None:
    first = run_ranks(waiting_lines, 2, init=False)[0][0]
    assert first.startswith("still waiting: rank 1 of 2 did not come to 127.0.0.1:") and first.endswith(" so far")


def in_agents_store(rank: int, world_size: int) -> list[list[str]]:
    """As torchrun starts ranks again: its store goes on, with what the ranks before left in it."""
    starts = []
    port = process_info().master_port
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    for start in ("0", "1"):
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": start}
        rendezvous = Rendezvous(process_info(), 5.0, QUIET)
        rendezvous.arrive({"start": start})
        if rank == 0:
            starts.append([info["start"] for info in rendezvous.rank_infos()])
        finish(rendezvous, rank)
    del agent  # it had to live until here
    return starts


def test_in_the_store_of_torchruns_agent() -> None:
    assert run_ranks(in_agents_store, 2, init=False)[0] == [["0", "0"], ["1", "1"]]


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([7, 4, 6], "ranks 4, 6-7")]
)
def test_named(ranks: list[int], text: str) -> None:
    assert named(ranks) == text
