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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LOOPBACK = "127.0.0.1"
EVERYWHERE = ""
"""The address of a store that listens on every interface."""
REMIND_EVERY_S = 15.0  # between two lines that say whom we wait for
_CONNECT_S = 5.0
_LONGEST_PAUSE_S = 0.5  # between two attempts to reach a store


class StoreUnreachable(RuntimeError):
    """No store answers at an address. The message holds only the reason, not the address."""


def host_store(address: str, port: int, timeout_s: float, *, multi_tenant: bool = False) -> "TCPStore":
    """Returns a store hosted by this process. Raises RuntimeError, as torch does, if the port is not
    available.

    address: an address of this machine. The store listens at this address alone (`listening_address`),
        because torch would listen on every interface, where anyone may read and write.
    timeout_s: for connecting, and for each answer of the store.
    multi_tenant: share a store that this process already hosts at the port.
    """
    listener = None if address == EVERYWHERE else _listen(address, port, multi_tenant)
    if listener is not None:
        port = listener.getsockname()[1]
    return _make_store(
        address or LOOPBACK, port, timeout_s, is_master=True, multi_tenant=multi_tenant,
        master_listen_fd=None if listener is None else listener.detach(),
    )  # fmt: skip


def listening_address(host: str, on_one_machine: bool) -> str:
    """Returns the address of this machine at which the store of a run listens.

    It is loopback if the whole run is on this machine. Else it is the address of `host`, the name by which
    other machines know this one. It is EVERYWHERE if `host` does not name exactly one address of this
    machine: its own hosts file may give the name a loopback address, or NAT or a Service of Kubernetes may
    stand before it.
    """
    if on_one_machine or host == "localhost":
        return LOOPBACK
    addresses = set()
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            address = str(place[0])
            if address == host or not ip_address(address.partition("%")[0]).is_loopback:
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.bind(place)  # only an address of our own can be bound
                    addresses.add(address)
    return addresses.pop() if len(addresses) == 1 else EVERYWHERE


def says_everywhere(host: str) -> str:
    """Returns the line for the log about a store that listens EVERYWHERE. host: as in `listening_address`."""
    return (
        f"the store of this run listens on every interface: MASTER_ADDR {host} is not one address of this machine "
        "(docs/launch.md, Security)"
    )


def connect_store(address: str, port: int, connect_s: float, timeout_s: float) -> "TCPStore":
    """Makes one attempt to connect to the store that another process hosts at `address:port`.

    Raises OSError or torch's RuntimeError if nobody answers within `connect_s`. Raises StoreUnreachable if
    another program is there, which gives no answer of a store within `timeout_s`.
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
    """Connects to the store at `address:port`, with retries for `patience_s` seconds, since its host may
    start later.

    timeout_s: for each answer of the store.
    pause_s: seconds between the first two attempts; the pause then doubles, up to half a second.
    remind: called every REMIND_EVERY_S with the reason of the last failure.

    Raises StoreUnreachable with the reason of the last failure, or at once if another program answers.
    """
    start = reminded = time.monotonic()
    reason = ""
    while (left_s := start + patience_s - time.monotonic()) > 0:
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
    """Writes `value` under `key` if the key has no value yet. Returns None, or the value that another process
    wrote first."""
    present = store.compare_set(key, "", value).decode()
    return None if present == value else present


def wait_for_condition(ready: Callable[[], bool], seconds: float, pause_s: float) -> bool:
    """Calls `ready` every `pause_s` seconds until it returns true. Returns False if that takes longer than
    `seconds`.

    The store's own wait is not used: it blocks other threads and prints at a timeout.
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
    """Waits until `expected` members have arrived. Returns False if nobody arrives for `patience_s` after the
    latest arrival.

    arrived: returns the number of members so far; called every `pause_s`.
    remind: called every REMIND_EVERY_S while waiting.
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
    """Returns a socket that listens at this address alone. Raises RuntimeError if the port is not available.

    Returns None if the port is in use and `multi_tenant`: torch then finds the store of this process there.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=4096)
    except (OSError, OverflowError) as problem:  # the latter: no port has this number
        number = getattr(problem, "errno", None)
        if number == errno.EADDRINUSE and multi_tenant:
            return None
        raise RuntimeError(f"{errno.errorcode.get(number or 0, '')} {address}:{port}: {problem}".strip()) from None


def _make_store(address: str, port: int, timeout_s: float, **options: Any) -> "TCPStore":
    """Creates a TCPStore in a thread, within the given time. options: passed to torch.

    Without a thread torch would wait for ever if the other side is not a store.
    """
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout_s)
    outcome: list[TCPStore | Exception] = []

    def make() -> None:
        try:
            outcome.append(TCPStore(address, port, timeout=limit, wait_for_workers=False, **options))
        except Exception as problem:  # handed to the waiting thread
            outcome.append(problem)

    thread = threading.Thread(target=make, name="store", daemon=True)
    thread.start()
    thread.join(timeout_s + 1)
    if not outcome:
        raise StoreUnreachable("another program answers at this address")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
