"""Launchers of several machines find each other and hear how the run ends: in one process, over real
sockets."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.launch import heartbeat
from megatron.launch.devices import free_port
from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node
from megatron.launch.launcher_rendezvous import LauncherRendezvous, RankAssignment
from megatron.launch.run import Run
from megatron.launch.ssh_supervisor import SshSupervisor
from megatron.launch.watch import Outcome


def run_of(ranks: list[int | None], node: int, port: int, **more) -> Run:
    nodes = tuple(Node(f"h{k}" if k == node else "", count if k == node else None) for k, count in enumerate(ranks))
    return Run("nodes", (), nodes, Path(), None, Path(), node, "127.0.0.1", port, **more)


@contextmanager
def assembled(ranks: list[int], **more) -> Iterator[tuple[list[LauncherRendezvous], list[RankAssignment]]]:
    """All machines of a run, assembled."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        runs = [run_of(ranks, node, port, **more) for node in range(len(ranks))]
        launchers = list(pool.map(lambda run: LauncherRendezvous(run, 20), runs))
        yield launchers, list(pool.map(lambda launcher: launcher.assemble(0), launchers))
        list(pool.map(lambda launcher: launcher.leave(Outcome(0)), launchers))


def final_outcome(launcher: LauncherRendezvous, seconds: float = 5.0) -> Outcome | None:
    deadline = time.monotonic() + seconds
    while (outcome := launcher.outcome()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return outcome


def test_ranks_follow_the_machines_in_order():
    with assembled([1, 3, 2]) as (launchers, assignments):
        assert [assignment.first_rank for assignment in assignments] == [0, 1, 4]
        assert {assignment.world_size for assignment in assignments} == {6}
        assert len({assignment.port for assignment in assignments}) == 1
        for launcher in launchers[:2]:
            launcher.report(Outcome(0))
        time.sleep(0.5)
        assert launchers[0].outcome() is None, "the run goes on as long as one machine's ranks do"
        launchers[2].report(Outcome(0))
        assert [final_outcome(launcher) for launcher in launchers] == [Outcome(0)] * 3


def test_the_first_failure_is_everyones_and_all_start_again_together():
    with assembled([1, 2]) as (launchers, _):
        launchers[1].report(Outcome(137, "rank 2 of 3 was killed by SIGKILL", True, "/b/rank_2.log"))
        time.sleep(0.6)
        launchers[0].report(Outcome(1, "rank 0 of 3 failed with exit code 1", True, "/a/rank_0.log"))
        host = socket.gethostname()
        expected = Outcome(137, f"node 1 (host {host}): rank 2 of 3 was killed by SIGKILL", True, "/b/rank_2.log")
        assert final_outcome(launchers[0]) == expected
        with ThreadPoolExecutor() as pool:
            ends = list(pool.map(lambda launcher: launcher.leave(Outcome(5)), launchers))
            assert ends == [expected] * 2
            assignments = list(pool.map(lambda launcher: launcher.assemble(1), launchers))
        assert [assignment.first_rank for assignment in assignments] == [0, 1]
        time.sleep(0.3)
        assert launchers[0].outcome() is None


def test_a_starter_sends_signals_to_all_and_its_end_stops_the_run(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_S", 1.0)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    with assembled([1, 1]) as (launchers, _):
        supervisor = SshSupervisor(run_of([1, 1], 0, launchers[0]._run.master_port or 0))
        supervisor.send(10)
        for _ in range(10):
            supervisor.beat()
            time.sleep(0.1)
        assert [launcher.signals() for launcher in launchers] == [[10], [10]]
        time.sleep(2.5)  # nobody beats any more
        assert [launcher.signals() for launcher in launchers] == [[15], [15]]
        assert launchers[0].outcome() is None


def test_a_machine_that_falls_silent_is_named(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_S", 1.0)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    with assembled([1, 1, 1]) as (launchers, _):
        beats = launchers[2]._heartbeat
        assert beats is not None
        beats._leaving.set()  # as when the machine loses its power
        outcome = final_outcome(launchers[0])
        assert outcome is not None and outcome.code == 1 and not outcome.repeatable
        assert outcome.reason.startswith("node 2 (host ") and "was not heard of for 1 s" in outcome.reason
        assert final_outcome(launchers[1]) == outcome


def _problem(future: Future) -> str:
    with pytest.raises(LaunchError) as problem:
        future.result(20)
    return str(problem.value)


def test_a_machine_that_does_not_come_is_named():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        first = pool.submit(lambda: LauncherRendezvous(run_of([1, 1, 1], 0, port), 1).assemble(0))
        third = pool.submit(lambda: LauncherRendezvous(run_of([1, 1, 1], 2, port), 1).assemble(0))
        problems = [_problem(first), _problem(third)]
    host = socket.gethostname()
    assert f"node 1 of 3 did not come within 1 s (here: node 0 (host {host}), node 2 (host {host}))" in problems[0]
    assert "node 1" in problems[1]
    assert time.monotonic() - began < 10


def test_node_0_that_is_not_there_is_named():
    port = free_port()
    with pytest.raises(LaunchError, match=f"node 0 did not answer at 127.0.0.1:{port} within 1 s .*refused"):
        LauncherRendezvous(run_of([1, 1], 1, port), 1)


def test_contradictions_are_named():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        ends = [
            pool.submit(lambda node=node: LauncherRendezvous(run_of([1, 1, 1], node, port), 2).assemble(0))
            for node in (0, 1, 1)
        ]
        assert "node_rank 1 is taken by host" in " ".join(_problem(end) for end in ends)
    with assembled([1, 1]) as (launchers, _):
        with pytest.raises(LaunchError, match=r"master_port: port \d+ cannot be used"):
            LauncherRendezvous(run_of([1, 1], 0, launchers[0]._run.master_port or 0), 1)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        ends = [
            pool.submit(lambda: LauncherRendezvous(run_of([1, 1], 0, port), 3).assemble(0)),
            pool.submit(lambda: LauncherRendezvous(run_of([1, 1, 1], 1, port), 3).assemble(0)),
        ]
        problem_text = " ".join(_problem(end) for end in ends)
    assert "num_nodes is 2 here" in problem_text or "num_nodes is 3 here" in problem_text
    port = free_port()
    with ThreadPoolExecutor() as pool:
        ends = [
            pool.submit(lambda node=node: LauncherRendezvous(run_of([1, 2], node, port, total_ranks=4), 3).assemble(0))
            for node in (0, 1)
        ]
        for end in ends:
            assert "TOTAL_GPUS is 4, but node 0" in _problem(end)
