"""This machine: its GPUs, which of them a run takes, and the names it goes by."""

import contextlib
import os
import random
import runpy
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron.launch.cuda_driver import device_count
from megatron.launch.environment import LaunchError

_NOT_EPHEMERAL = range(20_000, 32_768)  # below what Linux (32768 on) and macOS (49152 on) give to connections


def choose_ranks(
    gpus: Sequence[str], num_gpus: int | None = None, include: str | None = None, exclude: str | None = None
) -> tuple[int, tuple[str, ...]]:
    """Number of ranks, and the GPU of each in CUDA_VISIBLE_DEVICES' spelling (none without GPUs).

    gpus: what this machine shows (`visible_gpus`). include: the GPUs to use, exclude: those not to use, as
    `localhost:2,3`, DeepSpeed's spelling. Raises LaunchError when a GPU named or asked for is not there.
    """
    if include and exclude:
        raise LaunchError(f"exclude: {exclude!r}, but include: {include!r} names the GPUs to use; remove one of them")
    if not gpus:
        for key, value in (("include", include), ("exclude", exclude)):
            if value:
                raise LaunchError(f"{key}: {value!r} names GPUs, but this machine shows none; use num_gpus instead")
        return num_gpus or 1, ()
    chosen = _named_gpus("include", include, gpus) if include else list(gpus)
    if exclude:
        left_out = _named_gpus("exclude", exclude, gpus)
        chosen = [gpu for gpu in gpus if gpu not in left_out]
        if not chosen:
            raise LaunchError(f"exclude: {exclude!r} leaves none of the GPUs {', '.join(gpus)}; name fewer")
    wanted = len(chosen) if num_gpus is None else num_gpus
    if wanted > len(chosen):
        raise LaunchError(f"num_gpus: {wanted} GPUs asked for, to choose from are {', '.join(chosen)}; ask for fewer")
    return wanted, tuple(chosen[:wanted])


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; none where torch is built for CPUs."""
    count = _device_count()
    named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def _device_count() -> int:
    """torch.cuda.device_count(), without the seconds that importing torch takes where its build and the
    driver say as much."""
    spec = find_spec("torch")
    built = runpy.run_path(str(Path(spec.origin).with_name("version.py"))) if spec and spec.origin else {}
    if built.get("cuda"):
        count = device_count()
    else:
        count = 0 if built and not built.get("hip") else None
    if count is None:
        import torch

        return torch.cuda.device_count()
    return count


def is_this_machine(host: str) -> bool:
    """Whether a name or address is this machine's."""
    if host in _local_names():
        return True
    try:
        address = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.socket() as probe:
            probe.bind((address[0], 0))  # only an address of our own can be bound
    except OSError:
        return False
    return True


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _named_gpus(key: str, value: str, gpus: Sequence[str]) -> list[str]:
    """GPUs of `localhost:2,3`, or of `localhost`: all of them. key: whose value it is."""
    host, _, indices = value.partition(":")
    if host not in _local_names():
        raise LaunchError(f"{key}: {value!r} names another machine than this one; write localhost:0,1")
    named = [name.strip() for name in indices.split(",") if name.strip()] or list(gpus)
    for name in named:
        if name not in gpus:
            raise LaunchError(f"{key}: {value!r} asks for GPU {name}; this machine shows {', '.join(gpus)}")
    return named


def _local_names() -> tuple[str, ...]:
    return "localhost", "127.0.0.1", socket.gethostname()


def interface_to(address: str) -> str | None:
    """Name of the network interface of this machine that leads to an address (Linux); None where it cannot be
    told."""
    import fcntl
    import struct

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing, but chooses a route
            local_address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:  # an interface without an address
                    continue
                if socket.inet_ntoa(answer[20:24]) == local_address:
                    return name
    except OSError:
        return None
    return "lo" if local_address.startswith("127.") else None


def free_port() -> int:
    """A TCP port that is free on all addresses of this machine, and that the system gives to no connection
    either: rank 0 listens only seconds later."""
    for port in (*random.SystemRandom().sample(_NOT_EPHEMERAL, 50), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise OSError("no TCP port of this machine is free")
