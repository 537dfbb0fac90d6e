"""Exchanges heartbeats and signals between the machines of a run, so that no machine waits for a lost one.

`Heartbeat` is a thread of the launcher on each machine. `SshSupervisor` belongs to the process that started
these launchers over ssh.
"""

import queue
import threading
import time
from typing import TYPE_CHECKING

from megatron.distributed.store import claim, connect_store, wait_for_condition
from megatron.launch.run import Run
from megatron.process import say

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BEAT_S = 2.0  # between two heartbeats of a machine
SILENT_S = 30.0  # a machine without a heartbeat for this long counts as lost
ROUND_S = 0.2  # between two reads of the store
STARTER = "starter"  # the process that started the launchers over ssh
SIGTERM = 15
# Time limits of `SshSupervisor`
RETRY_S = 1.0  # between two tries to connect to the store
WARN_S = 10.0  # until it warns that a signal was not delivered
CONNECT_S = 1.0
STORE_S = 5.0  # for one answer of the store


class Heartbeat(threading.Thread):
    """A thread that connects this machine's launcher with the other launchers, through the store of node 0.

    It sends heartbeats, and exchanges signals and the outcome of one attempt (one start of the run).

    Keys of an attempt in the store, each with the prefix `<attempt>/`:

    `beat/<node>`: the time of the node's last heartbeat.
    `done/<node>`: exists once all ranks of the node have ended with exit code 0. Its value is the signal that
        was passed on to them, or 0.
    `left/<node>`: exists once the node's launcher leaves.
    `end`: JSON of the first failure.

    Keys of all attempts: `signal/<n>`, the n-th signal, and `beat/starter`, the last heartbeat of the process
    that started the launchers over ssh.
    """

    def __init__(self, store: "TCPStore", attempt: int, node: int, count: int) -> None:
        super().__init__(daemon=True)
        self.failure: str | None = None  # JSON of the Outcome that failed first, on any machine
        self.all_done = False
        self.signal = 0  # one that a machine passed on to its ranks before they ended well
        self._store, self._prefix, self._node, self._count = store, f"{attempt}/", node, count
        self._to_report: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._signals_seen = 0
        self._beats: dict[str, tuple[str, float]] = {}  # by node or STARTER: last beat, when it came
        self._done: set[int] = set()
        self._symptom_of_node_0: str | None = None
        self._answered_at = time.monotonic()
        self._leaving, self._left = threading.Event(), threading.Event()
        self._patience_s = 0.0

    def report_done(self, signal: int) -> None:
        """Tells the other machines that all ranks of this machine ended with exit code 0.

        signal: the signal that was passed on to these ranks, or 0.
        """
        self._to_report.put(("done", str(signal)))

    def report_failure(self, outcome: str) -> None:
        """Tells the other machines that a rank of this machine failed. outcome: JSON of an `Outcome`."""
        self._to_report.put(("end", outcome))

    def take_signals(self) -> list[int]:
        """Returns the signals that arrived since the last call, in order of arrival."""
        signals = []
        while not self._signals.empty():
            signals.append(self._signals.get())
        return signals

    def silent_node(self) -> tuple[int, str] | None:
        """Returns (node, symptom in words) of a machine that seems lost. None if every machine sent a
        heartbeat in the last 30 s."""
        if self._symptom_of_node_0 is not None:
            return 0, self._symptom_of_node_0
        now = time.monotonic()
        if self._node and now - self._answered_at > SILENT_S:
            return 0, f"has not answered for {SILENT_S:.0f} s"
        for sender, (_, heard_at) in list(self._beats.items()):
            if sender != STARTER and now - heard_at > SILENT_S and int(sender) not in self._done:
                return int(sender), f"was not heard of for {SILENT_S:.0f} s"
        return None

    def forgive_silence(self) -> None:
        """Restarts the time limit for the next heartbeat of every machine. Called after this machine was
        suspended."""
        self._answered_at = time.monotonic()
        self._beats = {sender: (beat, self._answered_at) for sender, (beat, _) in self._beats.items()}

    def leave(self, patience_s: float) -> None:
        """Sends pending reports and ends the thread. Waits at most `patience_s` seconds for the other
        machines to leave."""
        self._patience_s = patience_s
        self._leaving.set()
        self._left.wait(patience_s + 3.0)

    def run(self) -> None:
        """Sends heartbeats and exchanges reports until `leave` is called or the store is lost."""
        try:
            self._signals_seen = self._store.add("signals", 0)  # earlier ones were for an earlier attempt
            beat_at = 0.0
            while not self._leaving.is_set():
                if time.monotonic() - beat_at > BEAT_S:
                    beat_at = time.monotonic()
                    self._store.set(f"{self._prefix}beat/{self._node}", str(beat_at))
                    if self._node == 0:
                        self._read_beats()
                self._exchange()
                self._answered_at = time.monotonic()
                self._leaving.wait(ROUND_S)
            self._exchange()
            self._wait_for_others()
        except RuntimeError:  # torch raises it if the process that hosts the store is gone
            self._symptom_of_node_0 = "is gone"
        finally:
            self._left.set()

    def _exchange(self) -> None:
        store, prefix = self._store, self._prefix
        while not self._to_report.empty():
            kind, text = self._to_report.get()
            if kind == "done":
                store.set(f"{prefix}done/{self._node}", text)
            else:
                claim(store, f"{prefix}end", text)  # the first failure is the run's
        if self.failure is None and store.check([f"{prefix}end"]):
            self.failure = store.get(f"{prefix}end").decode()
        for node in range(self._count):
            if node not in self._done and store.check([f"{prefix}done/{node}"]):
                self._done.add(node)
                self.signal = self.signal or int(store.get(f"{prefix}done/{node}"))
        self.all_done = len(self._done) == self._count
        while store.check([f"signal/{self._signals_seen + 1}"]):
            self._signals_seen += 1
            self._signals.put(int(store.get(f"signal/{self._signals_seen}")))

    def _read_beats(self) -> None:
        """Records on node 0 when the last heartbeat of each machine arrived. If the process that started the
        launchers over ssh is lost, sends SIGTERM to all ranks."""
        keys = {str(node): f"{self._prefix}beat/{node}" for node in range(1, self._count)}
        for sender, key in {**keys, STARTER: f"beat/{STARTER}"}.items():
            if sender != STARTER and sender not in self._beats:
                self._beats[sender] = ("", time.monotonic())
            if not self._store.check([key]):
                continue
            beat = self._store.get(key).decode()
            latest, heard_at = self._beats.get(sender, ("", 0.0))
            if beat != latest:
                self._beats[sender] = (beat, time.monotonic())
            elif sender == STARTER and time.monotonic() - heard_at > SILENT_S:
                del self._beats[sender]
                self._store.delete_key(key)
                send_signal(self._store, SIGTERM)

    def _wait_for_others(self) -> None:
        """Tells the other machines that this machine leaves. Node 0 then waits for them, because it hosts the
        store."""
        self._store.set(f"{self._prefix}left/{self._node}", "1")
        keys = [f"{self._prefix}left/{node}" for node in range(self._count)]
        if self._patience_s:
            wait_for_condition(lambda: self._store.check(keys), self._patience_s, 0.05)


def send_signal(store: "TCPStore", number: int) -> None:
    """Makes every launcher pass the signal `number` on to its ranks."""
    store.set(f"signal/{store.add('signals', 1)}", str(number))


class SshSupervisor:
    """Sends signals to the ranks through the store of node 0, because ssh forwards no signals.

    It also sends heartbeats from the process that started the launchers over ssh. If these heartbeats stop,
    the launchers stop the run.
    """

    def __init__(self, run: Run) -> None:
        self._address, self._port = run.master_addr, run.master_port or 0
        self._store: TCPStore | None = None
        self._to_send: list[int] = []
        self._asked_at: float | None = None
        self._tried_at = self._beat_at = 0.0

    def send(self, number: int) -> None:
        """Sends a signal to all ranks: now, or as soon as node 0 answers."""
        self._to_send.append(number)
        self._asked_at = time.monotonic()
        self.beat()

    def beat(self) -> None:
        """Sends pending signals and a heartbeat. Call it often: it connects at most every second, and sends a
        heartbeat at most every 2 s."""
        now = time.monotonic()
        if self._asked_at and self._to_send and now - self._asked_at > WARN_S:
            say(
                f"deepy.py: node 0 does not answer at {self._address}:{self._port}, so the signal has not reached "
                "the ranks yet; send a second signal to end the run"
            )
            self._asked_at = None
        try:
            if self._store is None:
                if now - self._tried_at > RETRY_S:
                    self._tried_at = now
                    self._store = connect_store(self._address, self._port, CONNECT_S, STORE_S)
                return
            while self._to_send:
                send_signal(self._store, self._to_send[0])
                self._to_send.pop(0)
            if now - self._beat_at > BEAT_S:
                self._beat_at = now
                self._store.set(f"beat/{STARTER}", str(now))
        except (OSError, RuntimeError):  # not there yet, or not any more
            self._store = None
