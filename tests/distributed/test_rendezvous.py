"""Ranks that meet in a store in bounded time, and what is said when some do not come."""

import logging
import os
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.distributed import store
from megatron.distributed.rendezvous import Rendezvous, StartError, format_ranks
from megatron.launch import process_info
from megatron.launch.devices import free_port
from tests.pool import run_ranks

QUIET = logging.getLogger("tests.quiet")
HOST = socket.gethostname()


def finish(rendezvous: Rendezvous, rank: int, world_size: int) -> None:
    """Rank 0, which has the store, ends after the others."""
    if rank == 0:
        rendezvous.release(timedelta(seconds=60))
        assert store.wait_for_condition(lambda: rendezvous._store.add("left", 0) == world_size - 1, 60, 0.01)
    else:
        rendezvous.answer_until_released(lambda question: None)
        rendezvous._store.add("left", 1)


def meet(
    rank: int, world_size: int, timeout_s: float, claimed_ranks: dict[int, int], port: int | None = None
) -> tuple[str, float]:
    """Returns the outcome of a rank, and seconds. claimed_ranks: the rank that each process says it is."""
    if rank not in claimed_ranks:
        return "absent", 0.0
    process, start_s = replace(process_info(), rank=claimed_ranks[rank]), time.monotonic()
    try:
        rendezvous = Rendezvous(replace(process, master_port=port or process.master_port), timeout_s, QUIET)
        rendezvous.arrive({})
        finish(rendezvous, rank, world_size)
        return "met", time.monotonic() - start_s
    except StartError as problem:
        return str(problem), time.monotonic() - start_s


def test_missing_ranks_are_named_to_all_that_came() -> None:
    assert [format_ranks(ranks) for ranks in ([3], [0, 1, 2, 5], [7, 4, 6])] == [
        "rank 3",
        "ranks 0-2, 5",
        "ranks 4, 6-7",
    ]
    outcomes = run_ranks(meet, 5, 2.0, {0: 0, 1: 1, 3: 3}, init=False)
    assert outcomes[2][0] == outcomes[4][0] == "absent"
    text, seconds = outcomes[0]
    for fact in ("ranks 2, 4 of 5", "127.0.0.1:", f"ranks 0-1, 3 (host {HOST})", "2 s", "rendezvous_timeout_s"):
        assert fact in text
    assert outcomes[1][0] == outcomes[3][0] == text, "told by rank 0, not cut off by its end"
    assert seconds >= 2


def test_rank_zero_that_does_not_answer_is_named_by_address() -> None:
    text, seconds = run_ranks(meet, 2, 0.5, {1: 1}, init=False)[1]
    for fact in (f"rank 1 (host {HOST})", "rank 0 at 127.0.0.1:", "0.5 s", "Connection refused"):
        assert fact in text
    assert seconds >= 0.5


def test_a_stranger_at_the_port_is_told_from_a_run() -> None:
    """torch alone would wait for it for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        outcomes = run_ranks(meet, 2, 0.5, {0: 0, 1: 1}, port, init=False)
    assert f"port {port} of host {HOST} is taken" in outcomes[0][0]
    assert f"rank 0 at 127.0.0.1:{port}" in outcomes[1][0] and "another program answers" in outcomes[1][0]


def test_two_processes_of_one_rank() -> None:
    rank_0_text, *other_texts = [text for text, _ in run_ranks(meet, 3, 3.0, {0: 0, 1: 1, 2: 1}, init=False)]
    assert "rank 2 of 3" in rank_0_text
    assert any("rank 1 (host" in text and "already at 127.0.0.1:" in text for text in other_texts), "who came second"


def waiting_lines(rank: int, world_size: int, flag_file: str) -> list[str]:
    """Rank 1 comes once rank 0 has said that it waits, which makes a file."""
    store.REMIND_EVERY_S = 0.1
    lines: list[str] = []

    def note(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        Path(flag_file).touch()

    logger = logging.getLogger("tests.waiting")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := logging.Handler())
    handler.emit = note  # type: ignore[method-assign]
    assert rank == 0 or store.wait_for_condition(Path(flag_file).exists, 60, 0.01)
    rendezvous = Rendezvous(process_info(), 60.0, logger)
    rendezvous.arrive({})
    finish(rendezvous, rank, world_size)
    return lines


def test_rank_zero_says_whom_it_waits_for(tmp_path: Path) -> None:
    first_line = run_ranks(waiting_lines, 2, str(tmp_path / "said"), init=False)[0][0]
    assert "waiting" in first_line and "rank 1 of 2" in first_line and "127.0.0.1:" in first_line


def in_agents_store(rank: int, world_size: int) -> list[list[str]]:
    """As torchrun starts ranks again: its store goes on, with what the ranks before left in it."""
    starts = []
    port = process_info().master_port
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    for start in ("0", "1"):
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": start}
        rendezvous = Rendezvous(process_info(), 60.0, QUIET)
        rendezvous.arrive({"start": start})
        if rank == 0:
            starts.append([info["start"] for info in rendezvous.rank_infos()])
        finish(rendezvous, rank, world_size)
    del agent  # it had to live until here
    return starts


def test_in_the_store_of_torchruns_agent() -> None:
    assert run_ranks(in_agents_store, 2, init=False)[0] == [["0", "0"], ["1", "1"]]


def test_a_store_that_comes_later_is_reached_and_a_key_is_claimed_once() -> None:
    port = free_port()
    with pytest.raises(store.StoreUnreachable, match="refused"):
        store.reach_store("127.0.0.1", port, patience_s=0.3, timeout_s=1.0, pause_s=0.1)
    hosts = []
    timer = threading.Timer(0.3, lambda: hosts.append(store.host_store("127.0.0.1", port, 5.0)))
    timer.start()
    reached = store.reach_store("127.0.0.1", port, patience_s=30.0, timeout_s=5.0)
    timer.join()
    hosts[0].set("key", "value")
    assert reached.get("key") == b"value"
    shared = dist.HashStore()
    assert store.claim(shared, "seat", "a") is None
    assert store.claim(shared, "seat", "b") == "a"


def test_who_waits_is_reminded_and_each_arrival_gives_the_next_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only sleep moves: members come 100 s after each other."""
    clock, reminders = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(store, "REMIND_EVERY_S", 30.0)
    for patience_s, in_time in ((150.0, True), (50.0, False)):
        clock[0] = 0.0
        arrived = store.wait_for_arrivals(
            lambda: 1 + int(clock[0] / 100), 4, patience_s, 1.0, lambda: reminders.append(clock[0])
        )
        assert arrived == in_time and clock[0] == (300.0 if arrived else 51.0)
    assert reminders == [31.0 * i for i in range(1, 10)] + [31.0]


def test_where_a_store_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """At loopback for one machine; else at the one address that the name has here, if it has one."""
    names = {"debian": ["127.0.1.1"], "service": ["203.0.113.9"]}

    def resolve(host: str, port: int | None, *args: object, **kwargs: object) -> list[tuple[object, ...]]:
        places = [(address, port or 0) for address in names.get(host, [host])]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert store.listening_address("service", on_one_machine=True) == "127.0.0.1"
    assert store.listening_address("127.0.0.2", on_one_machine=False) == "127.0.0.2", "as it was given"
    for host in ("debian", "service"):
        assert store.listening_address(host, on_one_machine=False) == store.EVERYWHERE
    server = store.host_store("127.0.0.2", 0, 5.0)
    store.connect_store("127.0.0.2", server.port, 5.0, 5.0)
    with pytest.raises(ConnectionRefusedError):
        store.connect_store("127.0.0.1", server.port, 5.0, 5.0)
