"""Connects the launchers of a run on several machines.

They wait for each other, learn their ranks and the port of rank 0, and share the outcome of the run.
"""

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import megatron.distributed.store as store
from megatron.launch.devices import free_port
from megatron.launch.environment import LaunchError
from megatron.launch.heartbeat import Heartbeat
from megatron.launch.watch import SUSPENDED_S, Outcome
from megatron.process import say

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megatron.launch.run import Run

REMIND_S = 15.0  # between two messages that this machine waits for other machines
POLL_S = 0.1
LEAVE_S = 10.0  # for other machines to read the outcome before node 0 closes the store
STORE_S = 30.0  # for one answer of the store


@dataclass(frozen=True)
class RankAssignment:
    """The first rank of this machine, the world size, and the port at which rank 0 listens for all ranks."""

    first_rank: int
    world_size: int
    port: int


class LauncherRendezvous:
    """Connects the launchers of all machines through a store, which node 0 hosts at master_addr:master_port.

    Each start of the run is an attempt, and keys of an attempt in the store begin with the attempt's number.
    During an attempt only a thread (`Heartbeat`) talks to the store. So a lost machine never blocks the
    launcher, which watches its own ranks.
    """

    def __init__(self, run: "Run", patience_s: float) -> None:
        """Hosts the store if this machine is node 0, else connects to the store of node 0.

        patience_s: seconds to wait for the other machines. Raises LaunchError if node 0 cannot be reached, or
        if the port is in use.
        """
        self._run = run
        self._patience_s = patience_s
        self._hosts = [node.host or "?" for node in run.nodes]
        self._hosts[run.node_rank] = socket.gethostname()
        self._store = self._host_store() if run.node_rank == 0 else self._reach_store()
        self._heartbeat: Heartbeat | None = None
        self._arrived: dict[int, dict] = {}  # by node: how its launcher described the machine
        self._attempt = 0
        self._wait_start = self._last_look = time.monotonic()
        self._finished = False

    def assemble(self, attempt: int) -> RankAssignment:
        """Waits until the launchers of all machines have joined this attempt. Returns this machine's first
        rank, the world size and the port of rank 0.

        attempt: number of this start of the run, from 0. Raises LaunchError for missing machines, for a
        node_rank used twice, and if the number of ranks is not TOTAL_GPUS.
        """
        run, node, count = self._run, self._run.node_rank, len(self._run.nodes)
        self._attempt, self._finished, self._arrived = attempt, False, {}
        nonce = secrets.token_hex(8)
        described = json.dumps({"host": socket.gethostname(), "ranks": run.node.ranks, "nodes": count, "who": nonce})
        try:
            claimed = store.claim(self._store, f"{attempt}/node/{node}", described)
            if claimed is not None:
                raise LaunchError(
                    f"node_rank {node} is used by host {json.loads(claimed)['host']} already; give each machine its own"
                )
            if not store.wait_for_arrivals(self._look_for_nodes, count, self._patience_s, POLL_S, self._remind):
                present = ", ".join(self._name(peer) for peer in sorted(self._arrived))
                raise LaunchError(
                    f"{self._missing()} of {count} did not join within {self._patience_s:.0f} s (joined: {present}); "
                    "start deepy.py on the missing machines too, with the same --num_nodes and --master_addr "
                    f"{run.master_addr}, or set a longer rendezvous_timeout_s"
                )
            if node == 0:
                self._store.set(f"{attempt}/port", str(free_port()))
            port = int(self._store.get(f"{attempt}/port"))
        except RuntimeError as problem:  # torch raises it if the process that hosts the store is gone
            raise LaunchError(
                f"node 0 ({run.master_addr}) ended while this machine waited for "
                f"{self._missing(exclude=node) or 'the port of rank 0'}; see the output of node 0"
            ) from problem
        ranks = [self._arrived[peer]["ranks"] for peer in range(count)]
        if run.total_ranks not in (None, sum(ranks)):
            counts = ", ".join(f"{self._name(peer)} has {ranks[peer]} ranks" for peer in range(count))
            raise LaunchError(f"TOTAL_GPUS is {run.total_ranks}, but {counts}; correct or unset TOTAL_GPUS")
        self._heartbeat = Heartbeat(self._store, attempt, node, count)
        self._heartbeat.start()
        return RankAssignment(sum(ranks[:node]), sum(ranks), port)

    def signals(self) -> list[int]:
        """Returns the signals that arrived since the last call, to be passed on to this machine's ranks.

        They come from the process that started the launchers over ssh.
        """
        return self._heartbeat.take_signals() if self._heartbeat else []

    def outcome(self) -> Outcome | None:
        """Returns the outcome of the run on all machines; None while it runs.

        The run succeeds once all machines report success. Otherwise the outcome is the first failure. A
        machine that sends no heartbeat for 30 s counts as a failure.
        """
        heartbeat = self._heartbeat
        if heartbeat is None:
            return None
        now = time.monotonic()
        if now - self._last_look > SUSPENDED_S:  # this machine was suspended, not the others
            heartbeat.forgive_silence()
        self._last_look = now
        if heartbeat.failure is not None:
            return Outcome(**json.loads(heartbeat.failure))
        if (silent := heartbeat.silent_node()) is not None:
            node, symptom = silent
            lost = Outcome(1, f"{self._name(node)} {symptom}; see the output of deepy.py on that machine")
            heartbeat.report_failure(json.dumps(asdict(lost)))
            return lost
        if heartbeat.all_done:
            return Outcome(0, signal=heartbeat.signal)
        if self._finished and now - self._wait_start > REMIND_S:
            say("deepy.py: all ranks of this machine have ended; waiting for the ranks of other machines")
            self._wait_start = now
        return None

    def report(self, outcome: Outcome) -> None:
        """Reports the outcome of this machine's ranks to the other machines. If it is the first failure, it
        becomes the outcome of the run."""
        if self._heartbeat is None:
            return
        self._finished, self._wait_start = True, time.monotonic()
        if not outcome.code:
            self._heartbeat.report_done(outcome.signal)
            return
        with_node = {**asdict(outcome), "reason": f"{self._name(self._run.node_rank)}: {outcome.reason}"}
        self._heartbeat.report_failure(json.dumps(with_node))

    def leave(self, local_outcome: Outcome) -> Outcome:
        """Ends this attempt and returns the outcome of the run: the first failure, else `local_outcome`.

        Node 0 first waits up to 10 s until the other machines have read the outcome. local_outcome: the
        outcome on this machine.
        """
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is None:
            return local_outcome
        heartbeat.leave(LEAVE_S if self._run.node_rank == 0 else 0.0)
        return local_outcome if heartbeat.failure is None else Outcome(**json.loads(heartbeat.failure))

    def _look_for_nodes(self) -> int:
        """Reads what newly arrived launchers say about their machines. Returns how many launchers have
        arrived.

        Raises LaunchError if a launcher was started with a different number of nodes.
        """
        for node in range(len(self._run.nodes)):
            key = f"{self._attempt}/node/{node}"
            if node not in self._arrived and self._store.check([key]):
                self._arrived[node] = peer = json.loads(self._store.get(key))
                self._hosts[node] = peer["host"]
                if peer["nodes"] != len(self._run.nodes):
                    raise LaunchError(
                        f"num_nodes is {len(self._run.nodes)} here ({socket.gethostname()}) and {peer['nodes']} on "
                        f"{self._name(node)}; only --node_rank and --include may differ between machines"
                    )
        return len(self._arrived)

    def _missing(self, exclude: int | None = None) -> str:
        """Returns the names of machines whose launchers have not arrived. exclude: a node to leave out."""
        nodes = (node for node in range(len(self._run.nodes)) if node not in self._arrived and node != exclude)
        return ", ".join(map(self._name, nodes))

    def _remind(self) -> None:
        say(f"deepy.py: waiting for {self._missing()} of {len(self._run.nodes)} nodes to start")

    def _name(self, node: int) -> str:
        host = self._hosts[node]
        return f"node {node}" + (f" (host {host})" if host != "?" else "")

    def _host_store(self) -> "TCPStore":
        port = self._run.master_port or 0
        try:
            address = store.listening_address(self._run.master_addr, on_one_machine=len(self._run.nodes) == 1)
            if address == store.EVERYWHERE:
                say(f"deepy.py: {store.says_everywhere(self._run.master_addr)}")
            return store.host_store(address, port, STORE_S)
        except RuntimeError as problem:
            raise LaunchError(
                f"master_port: port {port} cannot be used ({str(problem).splitlines()[0]}); set another on all machines"
            ) from None

    def _reach_store(self) -> "TCPStore":
        address, port = self._run.master_addr, self._run.master_port or 0

        def remind(reason: str) -> None:
            say(f"deepy.py: waiting for node 0 at {address}:{port} ({reason})")

        try:
            return store.reach_store(address, port, self._patience_s, STORE_S, remind=remind)
        except store.StoreUnreachable as problem:
            raise LaunchError(
                f"node 0 did not answer at {address}:{port} within {self._patience_s:.0f} s ({problem}); start "
                "deepy.py --node_rank 0 on that machine, and check that no firewall blocks the port"
            ) from None
