"""The launchers of a run on several machines: who is there, how many ranks each has, how the run ended."""

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron.launch.devices import free_port
from megatron.launch.environment import LaunchError
from megatron.launch.heartbeat import Courier
from megatron.launch.watch import SUSPENDED_S, Outcome
from megatron.process import say

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megatron.launch.plan import Run

SAY_S = 15.0
POLL_S = 0.1
LEAVE_S = 10.0  # for the others to read how the run ended, before node 0's store goes
STORE_S = 30.0  # for one answer of the store


@dataclass(frozen=True)
class Place:
    """Where this machine's ranks stand among all, and the port at which rank 0 will wait for them."""

    first_rank: int
    world_size: int
    port: int


class Meeting:
    """This launcher's seat at the store that the launcher of node 0 keeps at master_addr:master_port.

    Each start of the run (attempt) has keys of its own below its number. What is said during a run goes through a
    thread (`Courier`), so that a machine that vanished never blocks the watch over our own ranks.
    """

    def __init__(self, run: "Run", patience_s: float) -> None:
        """Raises LaunchError when node 0 cannot be reached, or the port cannot be had."""
        self._run = run
        self._patience = patience_s
        self._hosts = [node.host or "?" for node in run.nodes]
        self._hosts[run.node_rank] = socket.gethostname()
        self._store = self._serve() if run.node_rank == 0 else self._reach()
        self._courier: Courier | None = None
        self._attempt = 0
        self._waiting_since = self._looked = time.monotonic()
        self._finished = False

    def assemble(self, attempt: int) -> Place:
        """Wait until the launcher of every machine is here. Raises LaunchError, naming who is not."""
        run, rank, count = self._run, self._run.node_rank, len(self._run.nodes)
        self._attempt, self._finished = attempt, False
        own = json.dumps(
            {"host": socket.gethostname(), "ranks": run.node.ranks, "nodes": count, "who": secrets.token_hex(8)}
        )
        here: dict[int, dict] = {}
        try:
            taken = json.loads(self._store.compare_set(f"{attempt}/node/{rank}", "", own))
            if taken["who"] != json.loads(own)["who"]:
                raise LaunchError(
                    f"node_rank {rank} is taken by host {taken['host']}; every machine has one of its own"
                )
            said = latest = time.monotonic()
            while len(here) < count:
                for other in range(count):
                    if other not in here and self._store.check([f"{attempt}/node/{other}"]):
                        here[other] = json.loads(self._store.get(f"{attempt}/node/{other}"))
                        latest = time.monotonic()
                        self._hosts[other] = here[other]["host"]
                        self._agree(other, here[other])
                missing = ", ".join(self._name(other) for other in range(count) if other not in here)
                now = time.monotonic()
                if missing and now - latest > self._patience:
                    present = ", ".join(self._name(other) for other in sorted(here))
                    raise LaunchError(
                        f"{missing} of {count} did not come within {self._patience:.0f} s (here: {present}); start "
                        f"deepy.py there too, with the same --num_nodes and --master_addr {run.master_addr}, or set "
                        "rendezvous_timeout_s"
                    )
                if missing and now - said > SAY_S:
                    say(f"deepy.py: waiting for {missing} of {count}")
                    said = now
                time.sleep(POLL_S if missing else 0)
            if rank == 0:
                self._store.set(f"{attempt}/port", str(free_port()))
            port = int(self._store.get(f"{attempt}/port"))
        except RuntimeError as problem:  # torch's, of a store whose other end is gone
            absent = [self._name(other) for other in range(count) if other not in here and other != rank]
            raise LaunchError(
                f"node 0 ({run.master_addr}) ended while waiting for {', '.join(absent) or 'the port'}"
            ) from (problem)
        ranks = [here[other]["ranks"] for other in range(count)]
        if run.total_ranks not in (None, sum(ranks)):
            found = ", ".join(f"{self._name(other)} has {ranks[other]}" for other in range(count))
            raise LaunchError(f"TOTAL_GPUS is {run.total_ranks}, but {found}")
        self._courier = Courier(self._store, attempt, rank, count)
        self._courier.start()
        return Place(sum(ranks[:rank]), sum(ranks), port)

    def signals(self) -> list[int]:
        """Signals that whoever started the launchers sent to all of them."""
        return self._courier.take_signals() if self._courier else []

    def heard(self) -> Outcome | None:
        """How the run ended on all machines, or on the first that failed; None while it goes on."""
        courier = self._courier
        if courier is None:
            return None
        now = time.monotonic()
        if now - self._looked > SUSPENDED_S:  # we slept, not the others
            courier.excuse()
        self._looked = now
        if courier.outcome is not None:
            return Outcome(**json.loads(courier.outcome))
        silent = courier.silent()
        if silent is not None:
            other, why = silent
            gone = Outcome(1, f"{self._name(other)} {why}; see its output there")
            courier.say_end(json.dumps(asdict(gone)))
            return gone
        if courier.all_done:
            return Outcome(0)
        if self._finished and now - self._waiting_since > SAY_S:
            say("deepy.py: the ranks here have ended; waiting for those of other machines")
            self._waiting_since = now
        return None

    def tell(self, outcome: Outcome) -> None:
        """Say how our ranks ended; the first failure said is the run's."""
        if self._courier is None:
            return
        self._finished, self._waiting_since = True, time.monotonic()
        if not outcome.code:
            self._courier.say_done()
            return
        named = {**asdict(outcome), "reason": f"{self._name(self._run.node_rank)}: {outcome.reason}"}
        self._courier.say_end(json.dumps(named))

    def leave(self, own: Outcome) -> Outcome:
        """End this attempt: how it ended for all machines. Node 0 waits a little until the others know it too.

        own: how it ended here.
        """
        courier, self._courier = self._courier, None
        if courier is None:
            return own
        courier.leave(LEAVE_S if self._run.node_rank == 0 else 0.0)
        return own if courier.outcome is None else Outcome(**json.loads(courier.outcome))

    def _name(self, node: int) -> str:
        host = self._hosts[node]
        return f"node {node}" + (f" (host {host})" if host != "?" else "")

    def _agree(self, node: int, said: dict) -> None:
        if said["nodes"] != len(self._run.nodes):
            raise LaunchError(
                f"num_nodes is {len(self._run.nodes)} here ({socket.gethostname()}) and {said['nodes']} on "
                f"{self._name(node)}; type the same line but for --node_rank and --include"
            )

    def _serve(self) -> "TCPStore":
        from torch.distributed import TCPStore

        port = self._run.master_port or 0
        try:
            return TCPStore(
                "127.0.0.1", port, None, True, timedelta(seconds=STORE_S), wait_for_workers=False, use_libuv=True
            )  # fmt: skip
        except RuntimeError as problem:
            raise LaunchError(
                f"master_port: port {port} cannot be used ({str(problem).splitlines()[0]}); set another on all machines"
            ) from None

    def _reach(self) -> "TCPStore":
        from torch.distributed import TCPStore

        address, port = self._run.master_addr, self._run.master_port or 0
        began = said = time.monotonic()
        while True:
            try:
                socket.create_connection((address, port), timeout=5).close()
                return TCPStore(address, port, None, False, timedelta(seconds=STORE_S), wait_for_workers=False)
            except (OSError, RuntimeError) as problem:
                why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
            now = time.monotonic()
            if now - began > self._patience:
                raise LaunchError(
                    f"node 0 did not answer at {address}:{port} within {self._patience:.0f} s ({why}): is deepy.py "
                    "--node_rank 0 started there, and does no firewall close the port?"
                )
            if now - said > SAY_S:
                say(f"deepy.py: waiting for node 0 at {address}:{port} ({why})")
                said = now
            time.sleep(0.5)
