"""A torch TCPStore: hosting one, reaching one and waiting on it, always in bounded time.

Launchers and ranks both find each other through such a store. This module imports torch only when a store is
made, so that a launcher which needs none starts without the seconds that torch takes.
"""

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

REMIND_EVERY_S = 15.0  # between two lines that say whom we wait for
_CONNECT_S = 5.0
_LONGEST_PAUSE_S = 0.5  # between two attempts to reach a store


class StoreUnreachable(RuntimeError):
    """No store answers at an address; the message is the reason alone."""


def host_store(address: str, port: int, timeout_s: float, *, multi_tenant: bool = False) -> "TCPStore":
    """A store that this process keeps for the others. Raises torch's RuntimeError where the port cannot be
    had.

    address: what this process itself connects to. timeout_s: for the connection, and for one answer of the
    store. multi_tenant: share the store that this process may keep at the port already.
    """
    return _make_store(address, port, timeout_s, is_master=True, multi_tenant=multi_tenant)


def connect_store(address: str, port: int, connect_s: float, timeout_s: float) -> "TCPStore":
    """One attempt to reach the store that another process keeps at `address:port`.

    Raises OSError or torch's RuntimeError when nobody answers within `connect_s`, and StoreUnreachable when
    what answers is no store within `timeout_s`.
    """
    # First a bare connection: torch's own attempts print warnings while the host is not there yet.
    socket.create_connection((address, port), timeout=connect_s).close()
    return _make_store(address, port, timeout_s, is_master=False)


def reach_store(
    address: str,
    port: int,
    patience_s: float,
    timeout_s: float,
    *,
    pause_s: float = _LONGEST_PAUSE_S,
    remind: Callable[[str], None] = lambda reason: None,
) -> "TCPStore":
    """The store at `address:port`, tried again and again for `patience_s`, for its host may come later.

    timeout_s: for one answer of the store. pause_s: after the first attempt; it doubles up to half a second.
    remind: called with the reason of the last failure every REMIND_EVERY_S. Raises StoreUnreachable with that
    reason, at once when something else than a store answers.
    """
    began = reminded = time.monotonic()
    reason = ""
    while (left_s := began + patience_s - time.monotonic()) > 0:
        try:
            store = connect_store(address, port, min(_CONNECT_S, left_s), min(timeout_s, left_s))
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        except StoreUnreachable:
            raise
        except (OSError, RuntimeError) as problem:
            reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
        if time.monotonic() - reminded > REMIND_EVERY_S:
            remind(reason)
            reminded = time.monotonic()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise StoreUnreachable(reason)


def claim(store: "Store", key: str, value: str) -> str | None:
    """Write `value` under a key that nobody has written yet: None, or what another wrote there before us."""
    present = store.compare_set(key, "", value).decode()
    return None if present == value else present


def wait_until(ready: Callable[[], bool], seconds: float, pause_s: float) -> bool:
    """Look every `pause_s` until it is so; whether it became so in time.

    A wait of the store's own would block other threads that use it, and prints when its time is over.
    """
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


def wait_for_arrivals(
    arrived: Callable[[], int], expected: int, patience_s: float, pause_s: float, remind: Callable[[], None]
) -> bool:
    """Wait until `expected` members have come; False when nobody came for `patience_s` after the latest
    arrival.

    arrived: how many have come so far, asked every `pause_s`. remind: called every REMIND_EVERY_S meanwhile.
    """
    present, latest = 0, time.monotonic()
    reminded = latest
    while (count := arrived()) < expected:
        now = time.monotonic()
        if count > present:
            present, latest = count, now
        elif now - latest > patience_s:
            return False
        if now - reminded > REMIND_EVERY_S:
            remind()
            reminded = now
        time.sleep(pause_s)
    return True


def _make_store(address: str, port: int, timeout_s: float, is_master: bool, multi_tenant: bool = False) -> "TCPStore":
    """A TCPStore in the given time, by a thread: torch waits for ever for the answer of a stranger."""
    from torch.distributed import TCPStore

    outcome: list[TCPStore | Exception] = []

    def make() -> None:
        try:
            outcome.append(
                TCPStore(
                    address, port, is_master=is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
                    multi_tenant=multi_tenant,
                )
            )  # fmt: skip
        except Exception as problem:  # handed to the waiting thread
            outcome.append(problem)

    thread = threading.Thread(target=make, name="store", daemon=True)
    thread.start()
    thread.join(timeout_s + 1)
    if not outcome:
        raise StoreUnreachable("something that is no run of this program answers there")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
