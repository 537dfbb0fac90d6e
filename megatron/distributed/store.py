"""A torch TCPStore: hosting one, reaching one and waiting on it, always in bounded time.

Launchers and ranks both find each other through such a store. This module imports torch only when a store is
made, so that a launcher which needs none starts without the seconds that torch takes.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LOOPBACK = "127.0.0.1"
EVERYWHERE = ""
"""The address of a store that listens on every interface."""
REMIND_EVERY_S = 15.0  # between two lines that say whom we wait for
_CONNECT_S = 5.0
_LONGEST_PAUSE_S = 0.5  # between two attempts to reach a store


class StoreUnreachable(RuntimeError):
    """No store answers at an address; the message is the reason alone."""


def host_store(address: str, port: int, timeout_s: float, *, multi_tenant: bool = False) -> "TCPStore":
    """A store that this process keeps for the others. Raises RuntimeError, as torch, where the port cannot be
    had.

    address: of this machine, at which it listens (`listening_address`); nobody can reach it by another. Of
    itself torch listens on every interface, and whoever connects may read and write. timeout_s: for the
    connection, and for one answer of the store. multi_tenant: share the store that this process may keep at
    the port already.
    """
    listener = None if address == EVERYWHERE else _listen(address, port, multi_tenant)
    if listener is not None:
        port = listener.getsockname()[1]
    return _make_store(
        address or LOOPBACK, port, timeout_s, is_master=True, multi_tenant=multi_tenant,
        master_listen_fd=None if listener is None else listener.detach(),
    )  # fmt: skip


def listening_address(host: str, on_one_machine: bool) -> str:
    """The address of this machine at which the store of a run listens.

    Loopback where the whole run is on this machine, else the address that `host` has here, the name by which
    other machines know this one. EVERYWHERE where that is not one address of this machine: its own hosts file
    may give the name a loopback address, and NAT or a Service of Kubernetes may stand before it.
    """
    if on_one_machine or host == "localhost":
        return LOOPBACK
    found = set()
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            address = str(place[0])
            if address == host or not ip_address(address.partition("%")[0]).is_loopback:
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.bind(place)  # only an address of our own can be bound
                    found.add(address)
    return found.pop() if len(found) == 1 else EVERYWHERE


def says_everywhere(host: str) -> str:
    """What is said of a store that listens EVERYWHERE. host: that `listening_address` was asked for."""
    return (
        f"the store of this run listens on every interface: MASTER_ADDR {host} is not one address of this machine "
        "(docs/launch.md, What a neighbour can do)"
    )


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


def _listen(address: str, port: int, multi_tenant: bool) -> socket.socket | None:
    """A socket that listens at this address alone; None where a store of this process may have the port, to
    which torch then leads. Raises RuntimeError."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=4096)
    except (OSError, OverflowError) as problem:  # the latter: no port has this number
        number = getattr(problem, "errno", None)
        if number == errno.EADDRINUSE and multi_tenant:
            return None
        raise RuntimeError(f"{errno.errorcode.get(number or 0, '')} {address}:{port}: {problem}".strip()) from None


def _make_store(
    address: str,
    port: int,
    timeout_s: float,
    is_master: bool,
    multi_tenant: bool = False,
    master_listen_fd: int | None = None,
) -> "TCPStore":
    """A TCPStore in the given time, by a thread: torch waits for ever for the answer of a stranger."""
    from torch.distributed import TCPStore

    outcome: list[TCPStore | Exception] = []

    def make() -> None:
        try:
            outcome.append(
                TCPStore(
                    address, port, is_master=is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
                    multi_tenant=multi_tenant, master_listen_fd=master_listen_fd,
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
