"""Watches launchers that were started on other machines over ssh: sends them signals and signs of life."""

import time
from typing import TYPE_CHECKING

from megatron.distributed.store import connect_store
from megatron.launch.heartbeat import BEAT_S, STARTER, send_signal
from megatron.launch.run import Run
from megatron.process import say

if TYPE_CHECKING:
    from torch.distributed import TCPStore

RETRY_S = 1.0
WARN_S = 10.0
CONNECT_S = 1.0
STORE_S = 5.0  # for one answer of the store


class SshSupervisor:
    """Sends signals to the ranks through the store of node 0, because ssh forwards no signals.

    Its beats tell the machines that the process that started them over ssh is alive. Without beats the run is
    stopped.
    """

    def __init__(self, run: Run) -> None:
        self._address, self._port = run.master_addr, run.master_port or 0
        self._store: TCPStore | None = None
        self._to_send: list[int] = []
        self._asked_at: float | None = None
        self._tried_at = self._beat_at = 0.0

    def send(self, number: int) -> None:
        """Sends a signal to all ranks, as soon as node 0 answers."""
        self._to_send.append(number)
        self._asked_at = time.monotonic()
        self.beat()

    def beat(self) -> None:
        """Sends pending signals and a sign of life. Call it often; it connects and beats only every few
        seconds."""
        now = time.monotonic()
        if self._asked_at and self._to_send and now - self._asked_at > WARN_S:
            say(
                f"deepy.py: node 0 does not answer at {self._address}:{self._port}, so the signal is not "
                "passed on yet; a second one ends the run"
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
