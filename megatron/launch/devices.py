"""Finds the GPUs, cores, names, network interfaces and free ports of this machine, and chooses a run's
GPUs."""

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

_NOT_EPHEMERAL = range(20_000, 32_768)  # outgoing connections get ports from 32768 (Linux) or 49152 (macOS)


def choose_ranks(
    gpus: Sequence[str], num_gpus: int | None = None, include: str | None = None, exclude: str | None = None
) -> tuple[int, tuple[str, ...]]:
    """Returns the number of ranks, and the GPU of each rank as CUDA_VISIBLE_DEVICES spells it (empty without
    GPUs).

    gpus: the GPUs of this machine (`visible_gpus`).
    include: the GPUs to use, in DeepSpeed's spelling `localhost:2,3`.
    exclude: the GPUs not to use, in the same spelling.

    Raises LaunchError if a requested GPU does not exist, or if include and exclude are both set.
    """
    if include and exclude:
        raise LaunchError(f"exclude: {exclude!r} and include: {include!r} cannot be set together; remove one of them")
    if not gpus:
        for key, value in (("include", include), ("exclude", exclude)):
            if value:
                raise LaunchError(f"{key}: {value!r} names GPUs, but none is visible; remove it, or set num_gpus")
        return num_gpus or 1, ()
    chosen = _named_gpus("include", include, gpus) if include else list(gpus)
    if exclude:
        left_out = _named_gpus("exclude", exclude, gpus)
        chosen = [gpu for gpu in gpus if gpu not in left_out]
        if not chosen:
            raise LaunchError(f"exclude: {exclude!r} removes every GPU ({', '.join(gpus)}); exclude fewer")
    count = len(chosen) if num_gpus is None else num_gpus
    if count > len(chosen):
        raise LaunchError(f"num_gpus: {count} GPUs requested, only {', '.join(chosen)} can be used; request fewer")
    return count, tuple(chosen[:count])


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, such as ["0", "1"].

    Returns [] if torch is built for CPUs.
    """
    count = _device_count()
    names = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] if names else [str(index) for index in range(count)]


def _device_count() -> int:
    """Returns torch.cuda.device_count(). torch, whose import takes seconds, is imported only if its version
    file and the driver do not give the number."""
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
    """Returns whether a host name or address belongs to this machine."""
    if host in _local_names():
        return True
    try:
        address = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.socket() as probe:
            probe.bind((address[0], 0))  # only an address of our own can be bound
    except (OSError, UnicodeError):  # UnicodeError: no name that the resolver takes
        return False
    return True


def cores() -> int:
    """Returns the number of CPU cores in this process's affinity mask, or of the machine if there is no mask.

    A container's CPU quota does not count."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _named_gpus(key: str, value: str, gpus: Sequence[str]) -> list[str]:
    """Returns the GPUs in `localhost:2,3`, or all GPUs for `localhost`.

    key: the configuration key of the value, for messages. Raises LaunchError for another host or an unknown
        GPU.
    """
    host, _, indices = value.partition(":")
    if host not in _local_names():
        raise LaunchError(f"{key}: {value!r} names another machine, not this one; write localhost:0,1")
    names = [name.strip() for name in indices.split(",") if name.strip()] or list(gpus)
    for name in names:
        if name not in gpus:
            raise LaunchError(f"{key}: {value!r} asks for GPU {name}; this machine shows {', '.join(gpus)}")
    return names


def _local_names() -> tuple[str, ...]:
    return "localhost", "127.0.0.1", socket.gethostname()


def interface_to(address: str) -> str | None:
    """Returns the network interface of this machine through which an address is reached (Linux); None if it
    cannot be determined."""
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
    """Returns a TCP port that is free on all addresses of this machine.

    The port is outside the range that the system uses for outgoing connections. Rank 0 listens on it only
    seconds later, and until then no outgoing connection should take it.
    """
    for port in (*random.SystemRandom().sample(_NOT_EPHEMERAL, 50), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise OSError("this machine has no free TCP port; close programs that hold ports")
