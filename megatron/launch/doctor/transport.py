"""Checks which network NCCL would use between machines.

On a machine with Slingshot, TCP is 17 times slower."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.launch.doctor.check import Check, failed, warning
from megatron.launch.environment import LaunchError
from megatron.launch.nccl import Nccl, choose, read_version, site_nccl

_BUILT_IN = ("IB", "Socket")
_SLOW_PROVIDERS = ("tcp", "sockets", "udp", "shm")


@dataclass(frozen=True)
class Network:
    """The network of this machine.

    interfaces: names of the network interfaces.
    infiniband: names of the InfiniBand and RoCE devices.
    slingshot: names of the Slingshot (cxi) devices.
    libraries: path of each NCCL library and plugin by its file name.
    loaded: paths of the NCCL libraries that this process has loaded.
    """

    interfaces: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    slingshot: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()


def read_network() -> Network:
    """Reads which network interfaces, network devices and NCCL libraries this machine has."""
    libraries: dict[str, str] = {}
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        for file in sorted(Path(folder).glob("libnccl*.so*")):
            libraries.setdefault(file.name, str(file))
    if shutil.which("ldconfig"):
        cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
        for name, file in re.findall(r"^\s*(libnccl\S+) .* => (\S+)$", cache, re.MULTILINE):
            libraries.setdefault(name, file)
    try:
        loaded = sorted(set(re.findall(r"/\S*libnccl\.so\S*", Path("/proc/self/maps").read_text())))
    except OSError:  # not Linux
        loaded = []
    return Network(
        _names("/sys/class/net"), _names("/sys/class/infiniband"), _names("/sys/class/cxi"), libraries, tuple(loaded)
    )


def nccl_check(torch_nccl: Nccl | None, env: Mapping[str, str], loaded: Sequence[str]) -> Check:
    """Checks that this process has loaded the NCCL that a run needs. The doctor is started like a run, so
    both load the same library.

    torch_nccl: torch's own NCCL.
    loaded: paths of the NCCL libraries that this process has loaded.
    """
    try:
        site = site_nccl(env)
    except LaunchError as problem:
        return failed("nccl", *str(problem).split("; ", 1))
    choice = choose(torch_nccl, site)
    preload = f"LD_PRELOAD={choice.preload} python deepy.py ..." if choice.preload else "unset LD_PRELOAD"
    for file in loaded:
        version = read_version(file)
        if torch_nccl is not None and torch_nccl.version and version and version < torch_nccl.version:
            finding = f"{Nccl(version)} ({file}) is loaded, older than the {torch_nccl} that torch was built with"
            return failed("nccl", finding, preload)
    loaded_files = {Path(file).resolve() for file in loaded}
    if site is not None and site.file == choice.preload and site.file and Path(site.file).resolve() not in loaded_files:
        return warning("nccl", f"{choice.description}: this library is not loaded", preload)
    return Check("nccl", "ok", choice.description)


def transport_check(env: Mapping[str, str], network: Network, several: bool = False) -> Check:
    """Checks which network transport NCCL would choose on this machine, from environment variables, NCCL's
    plugins and the machine's devices.

    several: whether the run has several machines. If so, TCP sockets give a warning.
    """
    net, plugin = env.get("NCCL_NET"), env.get("NCCL_NET_PLUGIN")
    file = _plugin(plugin, network)
    provider = env.get("FI_PROVIDER")
    set_here = [f"{name}={env[name]}" for name in ("NCCL_NET", "NCCL_NET_PLUGIN", "FI_PROVIDER") if env.get(name)]
    settings = f" ({', '.join(set_here)})" if set_here else ""
    advice = "add the library's folder to LD_LIBRARY_PATH (module load)"
    if plugin not in (None, "none") and file is None:
        return failed("transport", f"NCCL_NET_PLUGIN={plugin}: no such library", advice)
    if net is not None and net not in _BUILT_IN and file is None:
        return failed("transport", f"NCCL_NET={net}: its plugin libnccl-net.so is not found", advice)
    if net != "Socket" and file is not None and net != "IB":
        if provider in _SLOW_PROVIDERS:
            finding = f"plugin {file} over {provider}{settings}"
            return warning("transport", finding, "FI_PROVIDER=cxi on Slingshot, efa on AWS")
        return Check("transport", "ok", f"plugin {file}{settings}")
    disabled = env.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if network.infiniband and not disabled and net != "Socket":
        return Check("transport", "ok", f"InfiniBand or RoCE: {', '.join(network.infiniband)}{settings}")
    external = ", ".join(name for name in network.interfaces if name != "lo")
    tcp = f"TCP over {env.get('NCCL_SOCKET_IFNAME') or external or 'no interface'}{settings}"
    if network.slingshot and net != "Socket":
        return failed(
            "transport",
            f"{tcp}, although Slingshot is here ({', '.join(network.slingshot)})",
            "load the OFI plugin (aws-ofi-nccl) and set NCCL_NET='AWS Libfabric', FI_PROVIDER=cxi: TCP is 17x slower",
        )
    if fast := [*network.slingshot, *network.infiniband]:
        return warning("transport", f"{tcp}, although {', '.join(fast)} is here", "unset NCCL_NET and NCCL_IB_DISABLE")
    if several:
        return warning("transport", tcp, "slow between machines; NCCL_DEBUG=INFO shows what a run uses")
    return Check("transport", "ok", f"{tcp}; within this machine shared memory and NVLink")


def interface_checks(env: Mapping[str, str], interfaces: tuple[str, ...]) -> list[Check]:
    """Returns a failed check for NCCL_SOCKET_IFNAME, and for GLOO_SOCKET_IFNAME, if this machine has none of
    the interfaces that the variable names. Ranks could then not connect."""
    checks = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or name.startswith("GLOO")
        entries = [entry for entry in value.removeprefix("=").split(",") if entry]
        present = [i for i in interfaces if any(i == entry or not exact and i.startswith(entry) for entry in entries)]
        if not present:
            finding = f"{value}: no such interface; here are {', '.join(interfaces) or 'none'}"
            checks.append(failed(name, finding, f"set {name} to one of these, or unset it"))
    return checks


def _plugin(plugin: str | None, network: Network) -> str | None:
    """Returns the path of NCCL's network plugin; None without one.

    plugin: value of NCCL_NET_PLUGIN: a name, a path or `none`. None: libnccl-net.so, else libnccl-net-ofi.so.
    """
    if plugin == "none":
        return None
    if plugin and "/" in plugin:
        return plugin if Path(plugin).is_file() else None
    for name in [f"libnccl-net-{plugin}.so", plugin] if plugin else ["libnccl-net.so", "libnccl-net-ofi.so"]:
        if name in network.libraries:
            return network.libraries[name]
    return None


def _names(folder: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()
