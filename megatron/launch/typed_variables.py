"""Variables that people set on each machine before they type: MAIN_NODE_IP, GPUS and TOTAL_GPUS.

MAIN_NODE_IP and TOTAL_GPUS are taken, or refused, however a run is started. GPUS chooses where deepy.py
chooses GPUs on the machine itself. It is not read in a Slurm job, with a hostfile or `--hosts`, and by ranks
that torchrun has started: there others say which GPUs are used.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.launch.devices import choose_ranks, is_this_machine
from megatron.launch.environment import LaunchError, whole_number
from megatron.process import say

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

OF_ALL_MACHINES = ("MAIN_NODE_IP", "TOTAL_GPUS")
_EACH = "type on each machine --num_nodes N --node_rank R"


def main_node(env: Mapping[str, str]) -> str | None:
    """The address of the machine where the ranks meet, by MAIN_NODE_IP."""
    return env.get("MAIN_NODE_IP") or None


def main_node_among(env: Mapping[str, str], hosts: Sequence[str]) -> str | None:
    """As `main_node`, of a run on the machines `hosts`; none are named where they are not known.

    Raises LaunchError where it is none of them. Where names cannot be resolved it is taken, and that is said.
    """
    address = main_node(env)
    if address is None or not hosts or address in hosts:
        return address
    if is_this_machine(address) and any(map(is_this_machine, hosts)):  # which may have several addresses
        return address
    wanted = _addresses(address)
    for host in hosts if wanted else ():
        found = _addresses(host)
        if wanted & found:
            return address
        if not found:
            break
    else:
        if wanted:
            raise LaunchError(
                f"MAIN_NODE_IP={address} is none of the machines {', '.join(hosts)}; unset it, or, where it is another "
                "address of one of them, write it as master_addr"
            )
        host = address
    say(f"deepy.py: MAIN_NODE_IP={address} is taken unchecked: {host} cannot be resolved here")
    return address


def total_ranks(env: Mapping[str, str]) -> int | None:
    """The ranks of all machines, by TOTAL_GPUS. Raises LaunchError for what is no number."""
    return whole_number(env, "TOTAL_GPUS") if env.get("TOTAL_GPUS") else None


def check_world(env: Mapping[str, str], world_size: int, on_one_machine: bool) -> None:
    """Raises LaunchError where a run that is about to start has other ranks than TOTAL_GPUS, or is on this
    machine alone and MAIN_NODE_IP names another."""
    total, address = total_ranks(env), main_node(env)
    alone = f"{_EACH}, or unset it" if on_one_machine else "unset it, or start them all"
    if total not in (None, world_size):
        raise LaunchError(f"TOTAL_GPUS is {total}, but the machines have {world_size} ranks; {alone}")
    if on_one_machine and address is not None and not is_this_machine(address):
        raise LaunchError(f"MAIN_NODE_IP={address} is another machine, but all ranks are on this one; {alone}")


def choose_local_ranks(
    args: "NeoXArgs", env: Mapping[str, str], gpus: Sequence[str], ranks: int | None = None
) -> tuple[int, tuple[str, ...]]:
    """As `choose_ranks`, of this machine: by `num_gpus`, `include` and `exclude`, or, without `include`, by
    GPUS as in `2,3`. ranks: where `num_gpus` says nothing."""
    ranks = ranks if args.num_gpus is None else args.num_gpus
    named = env.get("GPUS")
    if named and not gpus:
        say(f"deepy.py: GPUS={named} in the environment names none: the run is on CPUs here")
    if not named or not gpus or args.include:
        return choose_ranks(gpus, ranks, args.include, args.exclude)
    if not re.fullmatch(r"\d+(,\d+)*", named):
        raise LaunchError(f"GPUS={named!r} in the environment does not name GPUs, as in 2,3; unset it")
    try:
        count, devices = choose_ranks(gpus, ranks, f"localhost:{named}", args.exclude)
    except LaunchError as problem:
        raise LaunchError(f"GPUS={named!r} in the environment names GPUs by their numbers: {problem}") from None
    say(f"deepy.py: GPUS={named} in the environment chose the GPUs: {','.join(devices)}")
    return count, devices


def _addresses(host: str) -> set[str]:
    """The addresses of a name or address; none where it cannot be resolved."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()
