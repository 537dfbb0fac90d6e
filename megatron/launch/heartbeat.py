"""A thread that speaks with the launchers of other machines, so that none ever waits for a machine that is
gone."""

import queue
import threading
import time
from typing import TYPE_CHECKING

from megatron.distributed.store import claim, wait_until

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BEAT_S = 2.0  # between two beats
SILENT_S = 30.0  # without a beat a machine is taken for gone
ROUND_S = 0.2  # between two looks at the store
STARTER = "starter"  # the process that started the launchers over ssh
SIGTERM = 15


class Heartbeat(threading.Thread):
    """Sends this machine's beats, and exchanges signals and the end of one attempt, through the store of node
    0.

    Keys below `<attempt>/`: `beat/<node>`, `done/<node>` (the signal that it passed on, or 0), `left/<node>`,
    `end` (JSON of the first failure); for all attempts: `signal/<n>`, `beat/starter`.
    """

    def __init__(self, store: "TCPStore", attempt: int, node: int, count: int) -> None:
        super().__init__(daemon=True)
        self.failure: str | None = None  # JSON of the first one's Outcome, of any machine
        self.all_done = False
        self.signal = 0  # that some machine passed on to its ranks, which ended well
        self._store, self._prefix, self._node, self._count = store, f"{attempt}/", node, count
        self._to_report: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._signals_seen = 0
        self._beats: dict[str, tuple[str, float]] = {}  # of node or starter: the latest, and when it changed
        self._done: set[int] = set()
        self._symptom_of_node_0: str | None = None
        self._answered_at = time.monotonic()
        self._leaving, self._left = threading.Event(), threading.Event()
        self._patience_s = 0.0

    def report_done(self, signal: int) -> None:
        """Tell the other machines that our ranks ended well. signal: that was passed on to them, or 0."""
        self._to_report.put(("done", str(signal)))

    def report_failure(self, outcome: str) -> None:
        """Tell the other machines that one of our ranks failed. outcome: JSON of an `Outcome`."""
        self._to_report.put(("end", outcome))

    def take_signals(self) -> list[int]:
        """Signals that came since the last call, in their order."""
        taken = []
        while not self._signals.empty():
            taken.append(self._signals.get())
        return taken

    def silent_node(self) -> tuple[int, str] | None:
        """The machine that seems gone and its symptom in words, as (node, symptom); None while all are heard
        of."""
        if self._symptom_of_node_0 is not None:
            return 0, self._symptom_of_node_0
        now = time.monotonic()
        if self._node and now - self._answered_at > SILENT_S:
            return 0, f"has not answered for {SILENT_S:.0f} s"
        for sender, (_, since) in list(self._beats.items()):
            if sender != STARTER and now - since > SILENT_S and int(sender) not in self._done:
                return int(sender), f"was not heard of for {SILENT_S:.0f} s"
        return None

    def forgive_silence(self) -> None:
        """Give whoever seems silent its time again, for this machine slept."""
        self._answered_at = time.monotonic()
        self._beats = {sender: (beat, self._answered_at) for sender, (beat, _) in self._beats.items()}

    def leave(self, patience_s: float) -> None:
        """Report what is still to be reported and end; wait at most `patience_s` for the others to have
        left."""
        self._patience_s = patience_s
        self._leaving.set()
        self._left.wait(patience_s + 3.0)

    def run(self) -> None:
        """Exchange beats and reports until asked to leave, or until the store is lost."""
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
        except RuntimeError:  # torch's, of a store whose other end is gone
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
        """On node 0: note when each machine was last heard of. When the starter goes, all ranks are asked to
        stop."""
        keys = {str(node): f"{self._prefix}beat/{node}" for node in range(1, self._count)}
        for sender, key in {**keys, STARTER: f"beat/{STARTER}"}.items():
            if sender != STARTER and sender not in self._beats:
                self._beats[sender] = ("", time.monotonic())
            if not self._store.check([key]):
                continue
            beat = self._store.get(key).decode()
            latest, since = self._beats.get(sender, ("", 0.0))
            if beat != latest:
                self._beats[sender] = (beat, time.monotonic())
            elif sender == STARTER and time.monotonic() - since > SILENT_S:
                del self._beats[sender]
                self._store.delete_key(key)
                send_signal(self._store, SIGTERM)

    def _wait_for_others(self) -> None:
        """Say that this machine leaves; node 0 leaves last, for the store goes with it."""
        self._store.set(f"{self._prefix}left/{self._node}", "1")
        keys = [f"{self._prefix}left/{node}" for node in range(self._count)]
        if self._patience_s:
            wait_until(lambda: self._store.check(keys), self._patience_s, 0.05)


def send_signal(store: "TCPStore", number: int) -> None:
    """Have every launcher pass a signal on to its ranks."""
    store.set(f"signal/{store.add('signals', 1)}", str(number))
