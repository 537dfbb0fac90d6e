"""The process that starts launchers on other machines over ssh: its signals, and that it is still there."""

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron.launch.heartbeat import BEAT_S, STARTER, send_signal
from megatron.launch.plan import Run
from megatron.process import say

if TYPE_CHECKING:
    from torch.distributed import TCPStore

TRY_S = 1.0
WARN_S = 10.0


class Front:
    """A guest at the store of node 0. ssh carries no signals, and machines must learn when nobody waits for them."""

    def __init__(self, run: Run) -> None:
        self._address = (run.master_addr, run.master_port or 0)
        self._store: TCPStore | None = None
        self._to_send: list[int] = []
        self._asked_at: float | None = None
        self._tried = self._beaten = 0.0

    def send(self, number: int) -> None:
        """Have a signal passed on to all ranks, as soon as node 0 answers."""
        self._to_send.append(number)
        self._asked_at = time.monotonic()
        self.beat()

    def beat(self) -> None:
        """Say that we are here, and what is to be sent. Called often; does something every few seconds."""
        now = time.monotonic()
        if self._asked_at and self._to_send and now - self._asked_at > WARN_S:
            say(
                f"deepy.py: node 0 does not answer at {self._address[0]}:{self._address[1]}, so the signal is not "
                "passed on yet; a second one ends the run"
            )
            self._asked_at = None
        try:
            if self._store is None:
                if now - self._tried > TRY_S:
                    self._tried = now
                    self._store = self._visit()
                return
            while self._to_send:
                send_signal(self._store, self._to_send[0])
                self._to_send.pop(0)
            if now - self._beaten > BEAT_S:
                self._beaten = now
                self._store.set(f"beat/{STARTER}", str(now))
        except (OSError, RuntimeError):  # not there yet, or not any more
            self._store = None

    def _visit(self) -> "TCPStore":
        from torch.distributed import TCPStore

        socket.create_connection(self._address, timeout=1).close()
        return TCPStore(*self._address, None, False, timedelta(seconds=5), wait_for_workers=False)
