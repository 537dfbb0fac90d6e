"""A thread that carries word between the launchers of a run, so that none ever waits for a machine that is gone."""

import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BEAT_S = 2.0
SILENT_S = 30.0  # without a beat a machine is taken for gone
ROUND_S = 0.2
STARTER = "starter"  # the process that started the launchers over ssh
SIGTERM = 15


class Courier(threading.Thread):
    """Beats, signals and the end of one attempt, through the store of node 0. Keys below `<attempt>/`: `beat/<node>`,
    `done/<node>`, `left/<node>`, `end` (JSON of the first failure); for all attempts: `signal/<n>`, `beat/starter`."""

    def __init__(self, store: "TCPStore", attempt: int, node: int, count: int) -> None:
        super().__init__(daemon=True)
        self.outcome: str | None = None  # JSON of the first failure
        self.all_done = False
        self._store, self._prefix, self._node, self._count = store, f"{attempt}/", node, count
        self._to_say: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._signals_seen = 0
        self._beats: dict[str, tuple[str, float]] = {}  # of node or starter: the latest, and when it changed
        self._done: set[int] = set()
        self._lost: str | None = None
        self._answered = time.monotonic()
        self._leaving, self._left = threading.Event(), threading.Event()
        self._patience = 0.0

    def say_done(self) -> None:
        """Our ranks ended well."""
        self._to_say.put(("done", ""))

    def say_end(self, outcome: str) -> None:
        """One of our ranks failed."""
        self._to_say.put(("end", outcome))

    def take_signals(self) -> list[int]:
        """Signals that came since the last call."""
        taken = []
        while not self._signals.empty():
            taken.append(self._signals.get())
        return taken

    def silent(self) -> tuple[int, str] | None:
        """(node, what is known of it) of a machine that seems gone."""
        if self._lost is not None:
            return 0, self._lost
        now = time.monotonic()
        if self._node and now - self._answered > SILENT_S:
            return 0, f"has not answered for {SILENT_S:.0f} s"
        for who, (_, since) in list(self._beats.items()):
            if who != STARTER and now - since > SILENT_S and int(who) not in self._done:
                return int(who), f"was not heard of for {SILENT_S:.0f} s"
        return None

    def excuse(self) -> None:
        """This machine slept: whoever seems silent has its time again."""
        self._answered = time.monotonic()
        self._beats = {who: (beat, self._answered) for who, (beat, _) in self._beats.items()}

    def leave(self, patience_s: float) -> None:
        """Say what is still to be said and end; wait so long for the others to have left."""
        self._patience = patience_s
        self._leaving.set()
        self._left.wait(patience_s + 3.0)

    def run(self) -> None:
        """Carry until told to leave, or the store is lost."""
        try:
            self._signals_seen = self._store.add("signals", 0)  # earlier ones were for an earlier attempt
            beat_at = 0.0
            while not self._leaving.is_set():
                if time.monotonic() - beat_at > BEAT_S:
                    beat_at = time.monotonic()
                    self._store.set(f"{self._prefix}beat/{self._node}", str(beat_at))
                    if self._node == 0:
                        self._listen_for_beats()
                self._carry()
                self._answered = time.monotonic()
                self._leaving.wait(ROUND_S)
            self._carry()
            self._go()
        except RuntimeError:  # torch's, of a store whose other end is gone
            self._lost = "is gone"
        finally:
            self._left.set()

    def _carry(self) -> None:
        store, prefix = self._store, self._prefix
        while not self._to_say.empty():
            kind, text = self._to_say.get()
            if kind == "done":
                store.set(f"{prefix}done/{self._node}", "1")
            else:
                store.compare_set(f"{prefix}end", "", text)
        if self.outcome is None and store.check([f"{prefix}end"]):
            self.outcome = store.get(f"{prefix}end").decode()
        for node in range(self._count):
            if node not in self._done and store.check([f"{prefix}done/{node}"]):
                self._done.add(node)
        self.all_done = len(self._done) == self._count
        while store.check([f"signal/{self._signals_seen + 1}"]):
            self._signals_seen += 1
            self._signals.put(int(store.get(f"signal/{self._signals_seen}")))

    def _listen_for_beats(self) -> None:
        """On node 0: when each machine was last heard of. When the starter goes, all ranks are asked to stop."""
        keys = {str(node): f"{self._prefix}beat/{node}" for node in range(1, self._count)}
        for who, key in {**keys, STARTER: f"beat/{STARTER}"}.items():
            if who != STARTER and who not in self._beats:
                self._beats[who] = ("", time.monotonic())
            if not self._store.check([key]):
                continue
            beat = self._store.get(key).decode()
            known, since = self._beats.get(who, ("", 0.0))
            if beat != known:
                self._beats[who] = (beat, time.monotonic())
            elif who == STARTER and time.monotonic() - since > SILENT_S:
                del self._beats[who]
                self._store.delete_key(key)
                send_signal(self._store, SIGTERM)

    def _go(self) -> None:
        """Node 0 leaves last, for the store goes with it."""
        self._store.set(f"{self._prefix}left/{self._node}", "1")
        deadline = time.monotonic() + self._patience
        others = [f"{self._prefix}left/{node}" for node in range(self._count)]
        while time.monotonic() < deadline and not self._store.check(others):
            time.sleep(0.05)


def send_signal(store: "TCPStore", number: int) -> None:
    """Have every launcher pass a signal on to its ranks."""
    store.set(f"signal/{store.add('signals', 1)}", str(number))
