"""Hosts a torch TCPStore, connects to one and waits for values in one, always within a time limit.

Launchers find each other through such a store, and so do ranks. This module imports torch, which takes
seconds, only when it makes a store. So a launcher that needs no store starts fast.
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
"""The address to pass for a store that listens on every network interface."""
REMIND_EVERY_S = 15.0  # seconds between two log lines about waiting
_CONNECT_S = 5.0
_LONGEST_PAUSE_S = 0.5  # longest pause between two attempts to connect


class StoreUnreachable(RuntimeError):
    """Raised when no store answers at an address. The message gives the reason, but not the address."""


def host_store(address: str, port: int, timeout_s: float, *, multi_tenant: bool = False) -> "TCPStore":
    """Starts a store in this process and returns it. Raises RuntimeError, as torch does, if the port is not
    available.

    address: the address of this machine to listen at (see `listening_address`), or EVERYWHERE. By default
        torch listens on every network interface, where anyone may read and write.
    timeout_s: time limit for connecting, and for each reply of the store.
    multi_tenant: reuse the store that this process already hosts at the port, if there is one.
    """
    listener = None if address == EVERYWHERE else _listen(address, port, multi_tenant)
    if listener is not None:
        port = listener.getsockname()[1]
    return _make_store(
        address or LOOPBACK, port, timeout_s, is_master=True, multi_tenant=multi_tenant,
        master_listen_fd=None if listener is None else listener.detach(),
    )  # fmt: skip


def listening_address(host: str, on_one_machine: bool) -> str:
    """Returns the address of this machine at which the store of a run should listen.

    host: the name or address by which other machines reach this machine (MASTER_ADDR).
    on_one_machine: whether all ranks of the run are on this machine.

    The result is loopback if all ranks are on this machine, else the address that `host` resolves to. It is
    EVERYWHERE if `host` does not resolve to exactly one address of this machine, as behind NAT or a
    Kubernetes Service, or if /etc/hosts maps the name to loopback.
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
    """Returns a log line that warns of a store that listens on every network interface. host: MASTER_ADDR."""
    return (
        f"the store of this run listens on every network interface, because MASTER_ADDR {host} is not exactly one "
        "address of this machine; see docs/launch.md, Security"
    )


def connect_store(address: str, port: int, connect_s: float, timeout_s: float) -> "TCPStore":
    """Makes one attempt to connect to the store that another process hosts at `address:port`.

    Raises OSError or torch's RuntimeError if nothing accepts the connection within `connect_s`. Raises
    StoreUnreachable if a program accepts it but does not reply as a store does within `timeout_s`.
    """
    # A plain connection comes first, because torch prints a warning for each attempt that fails.
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

    timeout_s: time limit for each reply of the store.
    pause_s: seconds between the first two attempts; the pause then doubles, up to half a second.
    remind: called every REMIND_EVERY_S seconds with the reason why the last attempt failed.

    Raises StoreUnreachable with the reason of the last failure. It does so without retries if the program at
    the address is not a store.
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
    """Writes `value` under `key` if the key has no value yet. Returns None if the key now holds `value`, else
    the value that another process wrote before."""
    present = store.compare_set(key, "", value).decode()
    return None if present == value else present


def wait_for_condition(ready: Callable[[], bool], seconds: float, pause_s: float) -> bool:
    """Calls `ready` every `pause_s` seconds until it returns true, then returns True. Returns False if that
    takes longer than `seconds`.

    Callers use it in place of the store's own wait, which blocks other threads and prints at a timeout.
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
    """Waits until `expected` members have arrived, then returns True. Returns False if no further member
    arrives for `patience_s` seconds.

    arrived: returns the number of members that have arrived; called every `pause_s` seconds.
    remind: called every REMIND_EVERY_S seconds while waiting.
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
    """Returns a socket that listens only at this address. Raises RuntimeError if the port is not available.

    If the port is in use and `multi_tenant` is true, returns None: torch then reuses this process's store
    there.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=4096)
    except (OSError, OverflowError) as problem:  # OverflowError: the port number is too large
        number = getattr(problem, "errno", None)
        if number == errno.EADDRINUSE and multi_tenant:
            return None
        raise RuntimeError(f"{errno.errorcode.get(number or 0, '')} {address}:{port}: {problem}".strip()) from None


def _make_store(address: str, port: int, timeout_s: float, **options: Any) -> "TCPStore":
    """Creates a TCPStore in a thread. Raises StoreUnreachable if that takes more than a second longer than
    `timeout_s`.

    Without the thread, torch would wait for ever if the program at the address is not a store.

    options: passed to TCPStore.
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
        raise StoreUnreachable("another program answers at this address, which is not a torch store")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
