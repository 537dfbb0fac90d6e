"""Checks this machine's port and name, and whether other machines answer."""

import errno
import os
import socket
import time
from pathlib import Path

from megatron.launch.doctor.check import Check, failed, warning
from megatron.neox_arguments.values.integers import parse_integer


def port_check(port: int) -> Check:
    """Checks that rank 0 could listen on this TCP port."""
    title = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            return failed(title, "may not be opened by this user", "set master_port to a port from 1024 on")
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                return failed(title, f"cannot be opened: {problem.strerror}", "set master_port to another port")
            owner = _owner(port)
            holder = f"by {owner}" if owner else "by another process"
            return failed(title, f"is taken {holder}", "set master_port to another port, or end that process")
    return Check(title, "ok", "is free")


def peer_check(peer: str, port: int, timeout_s: float = 3.0) -> Check:
    """Checks that another machine accepts a TCP connection.

    peer: `host:port`, `[v6]:port`, or `host`.
    port: used if `peer` has none.
    """
    host, number = split_address(peer, port)
    title = f"peer {host}:{number}"
    try:
        address = str(socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as problem:
        return failed(
            title, f"this host name has no address ({problem.strerror})", "check the name, /etc/hosts and DNS"
        )
    started = time.perf_counter()
    try:
        socket.create_connection((address, number), timeout_s).close()
    except ConnectionRefusedError:
        finding = f"{address} refuses the connection: nothing listens at port {number}, or a firewall refuses"
        advice = f"on that machine, first start the run, or `nc -l {number}` to try the port"
        return failed(title, finding, advice)
    except TimeoutError:
        finding = f"{address} does not answer within {timeout_s:g} s"
        return failed(
            title, finding, "check that the machine is on and in the same network, and no firewall is between"
        )
    except OSError as problem:
        return failed(title, f"{address}: {problem.strerror}", "check the address and the route to it")
    return Check(title, "ok", f"{address} answers after {1000 * (time.perf_counter() - started):.1f} ms")


def hostname_check() -> Check:
    """Checks that this machine's host name has an address, because gloo and other machines look it up."""
    name = socket.gethostname()
    try:
        return Check("hostname", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        return warning("hostname", f"{name} has no address", "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME")


def split_address(peer: str, port: int) -> tuple[str, int]:
    """Splits `host:port` into (host, port). If `peer` is only a host, `port` is used. Raises ValueError for
    an invalid port."""
    host, colon, number = peer.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, number = peer, str(port)
    peer_port = parse_integer(number)
    if peer_port is None or not 0 < peer_port < 65536:
        raise ValueError(f"{peer!r}: {number!r} is not a port; write HOST:29500")
    return host.strip("[]"), peer_port


def _owner(port: int) -> str | None:
    """Returns the process that listens on the port, as `process 123 (python)`. Returns None if this user
    cannot see the process, and outside Linux."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # listens
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            if any(os.readlink(entry) in inodes for entry in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # it ended, or is another user's
            continue
    return None
