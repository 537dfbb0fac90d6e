"""Reads the machines of a run from a hostfile or the flag `--hosts`, and chooses their slots."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.launch.environment import LaunchError

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

HOSTFILE = "/job/hostfile"  # DeepSpeed's default
# Prefixes of variables that are sent to other machines: DeepSpeed's list for CUDA, variables of networks, and
# ours. Secrets are never sent: they would be on a command line, which everybody on the machine can read.
_CARRIED = (
    "MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "LD_PRELOAD", "PATH", "FI_", "GLOO_", "NEOX_", "OMP_",
)  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """One machine.

    ranks: number of ranks; None if the machine counts its GPUs itself.
    devices: entries of CUDA_VISIBLE_DEVICES; empty: the first `ranks` GPUs, or no GPUs.
    """

    host: str
    ranks: int | None = None
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the machine as `--hosts` takes it: `a:2,3` (GPUs), `a=2` (number of ranks) or `a`."""
        if self.devices:
            return f"{self.host}:{','.join(self.devices)}"
        return self.host if self.ranks is None else f"{self.host}={self.ranks}"

    def include(self) -> str | None:
        """Returns the value of the key `include` that chooses this machine's GPUs, such as `localhost:2,3`;
        None without GPUs."""
        return f"localhost:{','.join(self.devices)}" if self.devices else None


def hosts_of(args: "NeoXArgs", hosts: Sequence[str], env: Mapping[str, str]) -> tuple[Node, ...]:
    """Returns the machines of a run with their slots, chosen by include, exclude, num_nodes and num_gpus.

    hosts: values of the flag `--hosts`. Without it a hostfile is read: the key `hostfile`, else the
    environment variable DLTS_HOSTFILE, else /job/hostfile if it exists. Without any of these the tuple is
    empty.

    Raises LaunchError for an unreadable hostfile, and for requested machines or slots that do not exist.
    """
    if hosts:
        return tuple(_host(text) for text in hosts)
    path = args.hostfile or env.get("DLTS_HOSTFILE") or (HOSTFILE if Path(HOSTFILE).is_file() else None)
    if path is None:
        return ()
    key = "hostfile" if args.hostfile else "DLTS_HOSTFILE"
    slots = {host: list(range(count)) for host, count in read_hostfile(path, key).items()}
    slots = choose_slots(slots, args.include, args.exclude, key=f"{key}: {path}")
    if args.num_nodes > len(slots):
        raise LaunchError(
            f"num_nodes: {args.num_nodes} requested, but {key} {path} offers only {len(slots)}: {', '.join(slots)}; "
            "request fewer, or add machines"
        )
    count = args.num_nodes if args.num_nodes > 0 else None
    nodes = [_node(host, host_slots) for host, host_slots in slots.items()][:count]
    if args.num_gpus is None:
        return tuple(nodes)
    for node in nodes:
        if args.num_gpus > (node.ranks or 0):
            raise LaunchError(
                f"num_gpus: {args.num_gpus} asked for, but {node.host} has {node.ranks} slots in {path}; lower it"
            )
    return tuple(replace(node, ranks=args.num_gpus, devices=node.devices[: args.num_gpus]) for node in nodes)


def read_hostfile(path: str | Path, key: str = "hostfile") -> dict[str, int]:
    """Returns the number of slots of each host in a hostfile: lines `host slots=N`, comments after `#`.

    key: the configuration key that names the file, for messages. Raises LaunchError if the file cannot be
    read, has a wrong line, or lists no slots.
    """
    slots_of: dict[str, int] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise LaunchError(f"{key}: {path} cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise LaunchError(f"{key}: {path} is not UTF-8 text (byte {problem.start}); write it again") from None
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d{1,6})", line)
        if match is None:
            raise LaunchError(f"{path}:{number}: {line!r} is not of the form `host slots=N`")
        if match[1] in slots_of:
            raise LaunchError(f"{path}:{number}: {match[1]} is listed twice; write it once, with the sum of its slots")
        slots_of[match[1]] = int(match[2])
    slots_of = {host: slots for host, slots in slots_of.items() if slots}
    if not slots_of:
        raise LaunchError(f"{key}: {path} lists no slots; write a line `HOST slots=N` for each machine")
    return slots_of


def choose_slots(
    slots: Mapping[str, list[int]], include: str | None, exclude: str | None, key: str = "hostfile"
) -> dict[str, list[int]]:
    """Returns the slot numbers of each host to use, in the hostfile's order.

    slots: all slot numbers of each host.
    include, exclude: in DeepSpeed's syntax. `a:2,3@b` means slots 2 and 3 of host a, and all slots of host b.

    Raises LaunchError for an unknown host or slot, and if no slot is left.
    """
    if include and exclude:
        raise LaunchError(f"exclude: {exclude!r} and include: {include!r} cannot be set together; remove one of them")
    if not include and not exclude:
        return dict(slots)
    key_name, text = ("include", include) if include else ("exclude", exclude)
    chosen: dict[str, set[int]] = {}
    for part in str(text).split("@"):
        host, colon, numbers = part.strip().partition(":")
        if host not in slots:
            raise LaunchError(f"{key_name}: {text!r} names {host}, which is not in {key} ({', '.join(slots)})")
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", numbers) and colon:
            raise LaunchError(f"{key_name}: {part!r} is not of the form HOST:0,1; correct it")
        for slot in map(int, numbers.split(",")) if colon else slots[host]:
            if slot not in slots[host]:
                raise LaunchError(
                    f"{key_name}: {text!r} names slot {slot} of {host}, which has {len(slots[host])} slots"
                )
            chosen.setdefault(host, set()).add(slot)
    remaining = {
        host: [slot for slot in host_slots if (slot in chosen.get(host, ())) == (key_name == "include")]
        for host, host_slots in slots.items()
    }
    remaining = {host: host_slots for host, host_slots in remaining.items() if host_slots}
    if not remaining:
        raise LaunchError(f"{key_name}: {text!r} removes every slot of {key}; exclude fewer")
    return remaining


def carried(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to send to other machines:

    - variables of `env` whose names begin with a prefix in `_CARRIED`, unless the name suggests a secret,
    - PYTHONPATH, with the working folder in front,
    - all variables in the file `.deepspeed_env` (or the file name in DS_ENV_FILE) of the home folder and of
      the working folder.

    Raises LaunchError if a line of such a file is not NAME=VALUE.
    """
    variables = {
        name: value for name, value in env.items() if name.startswith(_CARRIED) and not _SECRET.search(name)
    }  # fmt: skip
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), env.get("PYTHONPATH"))))
    for folder in (Path.home(), Path.cwd()):
        path = folder / env.get("DS_ENV_FILE", ".deepspeed_env")
        for number, line in enumerate(path.read_text().splitlines() if path.is_file() else (), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.strip().partition("=")
            if not equals:
                raise LaunchError(
                    f"{path}:{number}: not of the form NAME=VALUE; correct or remove this line"
                )  # a secret?
            variables[name] = value
    return variables


def _host(text: str) -> Node:
    """Parses a value of `--hosts`: `a:2,3` (GPUs), `a=2` (number of ranks) or `a` (all GPUs of machine a)."""
    match = re.fullmatch(r"([^\s:=,@]+)(?::(\d{1,6}(?:,\d{1,6})*)|=(\d{1,6}))?", text)
    if match is None or text.endswith((".py", ".yml", ".yaml")):
        raise LaunchError(
            f"--hosts: {text!r} is not HOST, HOST:0,1 or HOST=RANKS; --hosts takes all words up to the next flag, so "
            "write it after the script and its files"
        )
    devices = tuple(match[2].split(",")) if match[2] else ()
    return Node(match[1], len(devices) or (int(match[3]) if match[3] else None), devices)


def _node(host: str, slots: Sequence[int]) -> Node:
    is_prefix = list(slots) == list(range(len(slots)))  # the first N: also a machine without GPUs can give them
    return Node(host, len(slots), () if is_prefix else tuple(map(str, slots)))
