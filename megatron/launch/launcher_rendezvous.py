"""The launchers of a run on several machines: who is there, how many ranks each has, how the run ended."""

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megatron.distributed.store import (
    EVERYWHERE,
    StoreUnreachable,
    claim,
    host_store,
    listening_address,
    reach_store,
    says_everywhere,
    wait_for_arrivals,
)
from megatron.launch.devices import free_port
from megatron.launch.environment import LaunchError
from megatron.launch.heartbeat import Heartbeat
from megatron.launch.watch import SUSPENDED_S, Outcome
from megatron.process import say

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megatron.launch.run import Run

REMIND_S = 15.0  # between two lines that say that other machines still work
POLL_S = 0.1
LEAVE_S = 10.0  # for the others to read how the run ended, before node 0's store goes
STORE_S = 30.0  # for one answer of the store


@dataclass(frozen=True)
class RankAssignment:
    """Which of all ranks this machine has, and the port at which rank 0 will wait for them."""

    first_rank: int
    world_size: int
    port: int


class LauncherRendezvous:
    """What this launcher knows of those of the other machines, by a store that the launcher of node 0 hosts
    at master_addr:master_port.

    Each start of the run (attempt) has keys of its own below its number. What is said during a run goes
    through a thread (`Heartbeat`), so that a machine that vanished never blocks the watch over our own ranks.
    """

    def __init__(self, run: "Run", patience_s: float) -> None:
        """Raises LaunchError when node 0 cannot be reached, or the port cannot be had."""
        self._run = run
        self._patience_s = patience_s
        self._hosts = [node.host or "?" for node in run.nodes]
        self._hosts[run.node_rank] = socket.gethostname()
        self._store = self._host_store() if run.node_rank == 0 else self._reach_store()
        self._heartbeat: Heartbeat | None = None
        self._arrived: dict[int, dict] = {}  # what each launcher said of its machine, by node
        self._attempt = 0
        self._waiting_since = self._looked = time.monotonic()
        self._finished = False

    def assemble(self, attempt: int) -> RankAssignment:
        """Wait until the launcher of every machine is here. Raises LaunchError, naming who is not."""
        run, node, count = self._run, self._run.node_rank, len(self._run.nodes)
        self._attempt, self._finished, self._arrived = attempt, False, {}
        nonce = secrets.token_hex(8)
        described = json.dumps({"host": socket.gethostname(), "ranks": run.node.ranks, "nodes": count, "who": nonce})
        try:
            taken = claim(self._store, f"{attempt}/node/{node}", described)
            if taken is not None:
                raise LaunchError(
                    f"node_rank {node} is taken by host {json.loads(taken)['host']}; every machine has one of its own"
                )
            if not wait_for_arrivals(self._look_for_nodes, count, self._patience_s, POLL_S, self._remind):
                present = ", ".join(self._name(other) for other in sorted(self._arrived))
                raise LaunchError(
                    f"{self._missing()} of {count} did not come within {self._patience_s:.0f} s (here: {present}); "
                    f"start deepy.py there too, with the same --num_nodes and --master_addr {run.master_addr}, or set "
                    "rendezvous_timeout_s"
                )
            if node == 0:
                self._store.set(f"{attempt}/port", str(free_port()))
            port = int(self._store.get(f"{attempt}/port"))
        except RuntimeError as problem:  # torch's, of a store whose other end is gone
            raise LaunchError(
                f"node 0 ({run.master_addr}) ended while waiting for {self._missing(but=node) or 'the port'}"
            ) from (problem)
        ranks = [self._arrived[other]["ranks"] for other in range(count)]
        if run.total_ranks not in (None, sum(ranks)):
            counts = ", ".join(f"{self._name(other)} has {ranks[other]}" for other in range(count))
            raise LaunchError(f"TOTAL_GPUS is {run.total_ranks}, but {counts}")
        self._heartbeat = Heartbeat(self._store, attempt, node, count)
        self._heartbeat.start()
        return RankAssignment(sum(ranks[:node]), sum(ranks), port)

    def signals(self) -> list[int]:
        """Signals that whoever started the launchers sent to all of them."""
        return self._heartbeat.take_signals() if self._heartbeat else []

    def outcome(self) -> Outcome | None:
        """How the run ended on all machines, or on the first that failed; None while it goes on."""
        heartbeat = self._heartbeat
        if heartbeat is None:
            return None
        now = time.monotonic()
        if now - self._looked > SUSPENDED_S:  # we slept, not the others
            heartbeat.forgive_silence()
        self._looked = now
        if heartbeat.failure is not None:
            return Outcome(**json.loads(heartbeat.failure))
        silent = heartbeat.silent_node()
        if silent is not None:
            node, symptom = silent
            lost = Outcome(1, f"{self._name(node)} {symptom}; see its output there")
            heartbeat.report_failure(json.dumps(asdict(lost)))
            return lost
        if heartbeat.all_done:
            return Outcome(0, signal=heartbeat.signal)
        if self._finished and now - self._waiting_since > REMIND_S:
            say("deepy.py: the ranks here have ended; waiting for those of other machines")
            self._waiting_since = now
        return None

    def report(self, outcome: Outcome) -> None:
        """Say how our ranks ended; the first failure said is the run's."""
        if self._heartbeat is None:
            return
        self._finished, self._waiting_since = True, time.monotonic()
        if not outcome.code:
            self._heartbeat.report_done(outcome.signal)
            return
        with_node = {**asdict(outcome), "reason": f"{self._name(self._run.node_rank)}: {outcome.reason}"}
        self._heartbeat.report_failure(json.dumps(with_node))

    def leave(self, local_outcome: Outcome) -> Outcome:
        """End this attempt: how it ended for all machines. Node 0 waits a little until the others know it
        too.

        local_outcome: how it ended here.
        """
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is None:
            return local_outcome
        heartbeat.leave(LEAVE_S if self._run.node_rank == 0 else 0.0)
        return local_outcome if heartbeat.failure is None else Outcome(**json.loads(heartbeat.failure))

    def _look_for_nodes(self) -> int:
        """How many launchers have come, with what they say of themselves read. Raises LaunchError."""
        for node in range(len(self._run.nodes)):
            key = f"{self._attempt}/node/{node}"
            if node not in self._arrived and self._store.check([key]):
                self._arrived[node] = json.loads(self._store.get(key))
                self._hosts[node] = self._arrived[node]["host"]
                self._check_same_run(node)
        return len(self._arrived)

    def _check_same_run(self, node: int) -> None:
        nodes_there = self._arrived[node]["nodes"]
        if nodes_there != len(self._run.nodes):
            raise LaunchError(
                f"num_nodes is {len(self._run.nodes)} here ({socket.gethostname()}) and {nodes_there} on "
                f"{self._name(node)}; type the same line but for --node_rank and --include"
            )

    def _missing(self, but: int | None = None) -> str:
        """The machines that have not come, in words; `but` is left out."""
        nodes = (node for node in range(len(self._run.nodes)) if node not in self._arrived and node != but)
        return ", ".join(map(self._name, nodes))

    def _remind(self) -> None:
        say(f"deepy.py: waiting for {self._missing()} of {len(self._run.nodes)}")

    def _name(self, node: int) -> str:
        host = self._hosts[node]
        return f"node {node}" + (f" (host {host})" if host != "?" else "")

    def _host_store(self) -> "TCPStore":
        port = self._run.master_port or 0
        try:
            address = listening_address(self._run.master_addr, on_one_machine=len(self._run.nodes) == 1)
            if address == EVERYWHERE:
                say(f"deepy.py: {says_everywhere(self._run.master_addr)}")
            return host_store(address, port, STORE_S)
        except RuntimeError as problem:
            raise LaunchError(
                f"master_port: port {port} cannot be used ({str(problem).splitlines()[0]}); set another on all machines"
            ) from None

    def _reach_store(self) -> "TCPStore":
        address, port = self._run.master_addr, self._run.master_port or 0

        def remind(reason: str) -> None:
            say(f"deepy.py: waiting for node 0 at {address}:{port} ({reason})")

        try:
            return reach_store(address, port, self._patience_s, STORE_S, remind=remind)
        except StoreUnreachable as problem:
            raise LaunchError(
                f"node 0 did not answer at {address}:{port} within {self._patience_s:.0f} s ({problem}): is deepy.py "
                "--node_rank 0 started there, and does no firewall close the port?"
            ) from None
