"""Launchers of several machines find each other and hear how the run ends, over real sockets."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.launch import heartbeat
from megatron.launch.devices import free_port
from megatron.launch.environment import LaunchError
from megatron.launch.heartbeat import SshSupervisor
from megatron.launch.hosts import Node
from megatron.launch.launcher_rendezvous import LauncherRendezvous, RankAssignment
from megatron.launch.run import Run
from megatron.launch.watch import Outcome
from tests.launch.runs import wait_for


def run_of(ranks: list[int | None], node: int, port: int, **options) -> Run:
    nodes = tuple(Node(f"h{k}" if k == node else "", count if k == node else None) for k, count in enumerate(ranks))
    return Run("nodes", (), nodes, Path(), None, Path(), node, "127.0.0.1", port, **options)


@contextmanager
def assembled(ranks: list[int], **options) -> Iterator[tuple[list[LauncherRendezvous], list[RankAssignment]]]:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        runs = [run_of(ranks, node, port, **options) for node in range(len(ranks))]
        launchers = list(pool.map(lambda run: LauncherRendezvous(run, 200), runs))
        yield launchers, list(pool.map(lambda launcher: launcher.assemble(0), launchers))
        list(pool.map(lambda launcher: launcher.leave(Outcome(0)), launchers))


def final_outcome(launcher: LauncherRendezvous) -> Outcome | None:
    wait_for(lambda: launcher.outcome() is not None)
    return launcher.outcome()


def test_ranks_follow_the_machines_in_order():
    with assembled([1, 3, 2]) as (launchers, assignments):
        assert [assignment.first_rank for assignment in assignments] == [0, 1, 4]
        assert {assignment.world_size for assignment in assignments} == {6}
        assert len({assignment.port for assignment in assignments}) == 1
        for launcher in launchers[:2]:
            launcher.report(Outcome(0))
        wait_for(lambda: launchers[0]._heartbeat._done == {0, 1})
        assert launchers[0].outcome() is None, "the run goes on as long as one machine's ranks do"
        launchers[2].report(Outcome(0))
        assert [final_outcome(launcher) for launcher in launchers] == [Outcome(0)] * 3


def test_the_first_failure_ends_all_and_all_restart():
    with assembled([1, 2]) as (launchers, _):
        launchers[1].report(Outcome(137, "rank 2 of 3 was killed by SIGKILL", True, "/b/rank_2.log"))
        wait_for(lambda: launchers[1]._heartbeat.failure)
        launchers[0].report(Outcome(1, "rank 0 of 3 failed with exit code 1", True, "/a/rank_0.log"))
        host = socket.gethostname()
        expected = Outcome(137, f"node 1 (host {host}): rank 2 of 3 was killed by SIGKILL", True, "/b/rank_2.log")
        assert final_outcome(launchers[0]) == expected
        with ThreadPoolExecutor() as pool:
            assert list(pool.map(lambda launcher: launcher.leave(Outcome(5)), launchers)) == [expected] * 2
            assignments = list(pool.map(lambda launcher: launcher.assemble(1), launchers))
        assert [assignment.first_rank for assignment in assignments] == [0, 1]
        assert launchers[0].outcome() is None


def test_a_starter_sends_signals_to_all_and_its_end_stops_the_run(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    with assembled([1, 1]) as (launchers, _):
        supervisor = SshSupervisor(run_of([1, 1], 0, launchers[0]._run.master_port or 0))
        supervisor.send(10)
        received: list[list[int]] = [[], []]

        def listen() -> bool:
            for signals, launcher in zip(received, launchers, strict=True):
                signals += launcher.signals()
            return all(received)

        def beat() -> bool:
            supervisor.beat()
            return listen() and heartbeat.STARTER in launchers[0]._heartbeat._beats

        wait_for(beat)
        assert received == [[10], [10]]
        received = [[], []]
        monkeypatch.setattr(heartbeat, "SILENT_S", 1.0)  # nobody beats any more
        wait_for(listen)
        assert received == [[15], [15]]


def test_a_machine_that_falls_silent_is_named(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    with assembled([1, 1, 1]) as (launchers, _):
        launchers[2]._heartbeat._leaving.set()  # as when the machine loses its power
        launchers[2]._heartbeat.join()
        monkeypatch.setattr(heartbeat, "SILENT_S", 4.0)
        outcome = final_outcome(launchers[0])
        assert outcome.code == 1 and not outcome.repeatable
        assert re.match(r"node 2 \(host .*4 s", outcome.reason)
        assert final_outcome(launchers[1]) == outcome


def ends(timeout_s: float, *runs: Run) -> list[str]:
    """Returns the error of each launcher of a group that cannot assemble."""

    def problem(run: Run) -> str:
        with pytest.raises(LaunchError) as refused:
            LauncherRendezvous(run, timeout_s).assemble(0)
        return str(refused.value)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(problem, runs))


def test_a_missing_machine_and_node_0_are_named():
    port, host = free_port(), socket.gethostname()
    first_end, third_end = ends(3, run_of([1, 1, 1], 0, port), run_of([1, 1, 1], 2, port))
    assert all(fact in first_end for fact in ("node 1 of 3", "3 s", f"node 0 (host {host}), node 2 (host {host})"))
    assert "node 1" in third_end
    port = free_port()
    with pytest.raises(LaunchError, match=f"node 0 .* 127.0.0.1:{port} .*1 s .*refused"):
        LauncherRendezvous(run_of([1, 1], 1, port), 1)


def test_contradictions_are_named():
    port = free_port()
    assert "node_rank 1 is used by host" in " ".join(ends(3, *(run_of([1, 1, 1], node, port) for node in (0, 1, 1))))
    with assembled([1, 1]) as (launchers, _):
        with pytest.raises(LaunchError, match=r"master_port: port \d+"):
            LauncherRendezvous(run_of([1, 1], 0, launchers[0]._run.master_port or 0), 1)
    port = free_port()
    assert re.search("num_nodes is [23] here", " ".join(ends(3, run_of([1, 1], 0, port), run_of([1, 1, 1], 1, port))))
    port = free_port()
    for problem in ends(20, *(run_of([1, 2], node, port, total_ranks=4) for node in (0, 1))):
        assert "TOTAL_GPUS is 4" in problem and "node 0" in problem
