"""Reads MAIN_NODE_IP, GPUS and TOTAL_GPUS, which people set on each machine before they type the command.

MAIN_NODE_IP and TOTAL_GPUS are used, or refused with an error, however a run is started. GPUS is used only if
deepy.py chooses the GPUs of this machine: not in a Slurm job, with a hostfile or `--hosts`, or under
torchrun.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.launch.devices import choose_ranks, is_this_machine
from megatron.launch.environment import LaunchError, read_integer
from megatron.process import say

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

CLUSTER_VARIABLES = ("MAIN_NODE_IP", "TOTAL_GPUS")
_TYPE_ADVICE = "start each machine with --num_nodes N --node_rank R"


def resolve_main_node(env: Mapping[str, str], hosts: Sequence[str]) -> str | None:
    """Returns the value of MAIN_NODE_IP, the address at which ranks meet; None if it is unset.

    It must be an address of one of the machines `hosts`, else LaunchError is raised. Without hosts it is not
    checked. If names cannot be resolved, it is accepted and a message is printed.
    """
    address = env.get("MAIN_NODE_IP") or None
    if address is None or not hosts or address in hosts:
        return address
    if is_this_machine(address) and any(map(is_this_machine, hosts)):  # a machine may have several addresses
        return address
    main_addresses = _addresses(address)
    for host in hosts if main_addresses else ():
        addresses = _addresses(host)
        if main_addresses & addresses:
            return address
        if not addresses:
            break
    else:
        if main_addresses:
            raise LaunchError(
                f"MAIN_NODE_IP={address} is not an address of the machines {', '.join(hosts)}; unset it, or, if one of "
                "them does have this address, set master_addr to it"
            )
        host = address
    say(f"deepy.py: MAIN_NODE_IP={address} is used unchecked, because {host} cannot be resolved on this machine")
    return address


def total_ranks(env: Mapping[str, str]) -> int | None:
    """Returns the number of ranks on all machines, from TOTAL_GPUS; None if it is unset. Raises LaunchError
    if it is not a number."""
    return read_integer(env, "TOTAL_GPUS") if env.get("TOTAL_GPUS") else None


def check_world(env: Mapping[str, str], world_size: int, on_one_machine: bool) -> None:
    """Raises LaunchError if the run contradicts TOTAL_GPUS or MAIN_NODE_IP.

    TOTAL_GPUS must be the number of ranks. If all ranks run on this machine, MAIN_NODE_IP must be an address
    of this machine.
    """
    total, address = total_ranks(env), env.get("MAIN_NODE_IP")
    advice = f"{_TYPE_ADVICE}, or unset it" if on_one_machine else "unset it, or start all ranks"
    if total not in (None, world_size):
        raise LaunchError(f"TOTAL_GPUS is {total}, but the machines have {world_size} ranks; {advice}")
    if on_one_machine and address and not is_this_machine(address):
        raise LaunchError(f"MAIN_NODE_IP={address} names another machine, but all ranks run on this one; {advice}")


def choose_local_ranks(
    args: "NeoXArgs", env: Mapping[str, str], gpus: Sequence[str], ranks: int | None = None
) -> tuple[int, tuple[str, ...]]:
    """Returns the number of ranks on this machine and their GPUs, from num_gpus, include and exclude, like
    `choose_ranks`.

    If `include` is unset, the environment variable GPUS, such as `2,3`, chooses the GPUs. ranks: the number
    of ranks if num_gpus is unset.
    """
    ranks = ranks if args.num_gpus is None else args.num_gpus
    gpus_text = env.get("GPUS")
    if gpus_text and not gpus:
        say(f"deepy.py: GPUS={gpus_text} in the environment is ignored, because the run uses no GPUs on this machine")
    if not gpus_text or not gpus or args.include:
        return choose_ranks(gpus, ranks, args.include, args.exclude)
    if not re.fullmatch(r"\d+(,\d+)*", gpus_text):
        raise LaunchError(f"GPUS={gpus_text!r} in the environment is not a list of GPU numbers such as 2,3; correct it")
    try:
        count, devices = choose_ranks(gpus, ranks, f"localhost:{gpus_text}", args.exclude)
    except LaunchError as problem:
        raise LaunchError(f"GPUS={gpus_text!r} in the environment chooses GPUs by number, but {problem}") from None
    say(f"deepy.py: GPUS={gpus_text} in the environment chose the GPUs: {','.join(devices)}")
    return count, devices


def _addresses(host: str) -> set[str]:
    """Returns the addresses of a host; an empty set if its name cannot be resolved."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()
