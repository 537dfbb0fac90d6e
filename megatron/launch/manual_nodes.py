"""One line typed on each machine: which of the machines this is, and what the environment says of it."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.launch.environment import DEFAULT_PORT, LaunchError, port_of, whole_number
from megatron.launch.hosts import Node
from megatron.launch.typed_variables import main_node_among

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class ManualNode:
    """This machine among several on which the same line is typed, and what it was told to use.

    listed: as one that a hostfile or `--hosts` gives; else its GPUs are chosen here. ranks: of a pod, where
    its operator says.
    """

    nodes: tuple[Node, ...]
    node_rank: int
    master_addr: str
    master_port: int
    listed: bool
    ranks: int | None


def find_manual_node(
    args: "NeoXArgs",
    node_rank: int | None,
    listed: Sequence[Node],
    hosts: Sequence[str],
    env: Mapping[str, str],
) -> ManualNode | None:
    """The place of this machine, None when nothing says that it is one of several on which somebody types.

    Keys and flags come first, then MAIN_NODE_IP, then what Kubernetes operators set
    (PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE; RANK and WORLD_SIZE, which count pods where there is no
    LOCAL_RANK). listed: those of a hostfile or of `--hosts`. Raises LaunchError for what is incomplete or
    contradicts itself.
    """
    nodes_of_pods, rank_of_pod = _pods(env)
    if node_rank is None and int(env.get("WORLD_SIZE", "1") or 1) > 1 and {"RANK", "LOCAL_RANK"} <= set(env):
        raise LaunchError(
            f"RANK={env['RANK']} and LOCAL_RANK={env['LOCAL_RANK']} of WORLD_SIZE={env['WORLD_SIZE']} are set: this "
            "process is a rank already; start the script itself instead of deepy.py, or unset them"
        )
    node_rank = rank_of_pod if node_rank is None else node_rank
    count = args.num_nodes if args.num_nodes > 1 else len(listed) or nodes_of_pods or 1
    if node_rank is None:
        if hosts and count > 1:
            raise LaunchError(
                "--hosts reaches no other machine: type on each the line that --dry-run prints, or give a hostfile, "
                "which starts ranks over ssh"
            )
        if count > 1 and not listed:
            raise LaunchError(
                f"num_nodes: {count}, but which of them is this? Add --node_rank 0 to {count - 1} and --master_addr, "
                "or a hostfile, which starts ranks over ssh"
            )
        return None
    if not 0 <= node_rank < count:
        raise LaunchError(f"node_rank: {node_rank} is outside 0 to {count - 1}; --num_nodes says how many there are")
    address = args.master_addr or main_node_among(env, [node.host for node in listed])
    address = address or _first(env, "PET_MASTER_ADDR", "MASTER_ADDR")
    address = address or (listed[0].host if listed else "127.0.0.1" if count == 1 else None)
    if address is None:
        raise LaunchError(
            "node_rank: set master_addr (or MAIN_NODE_IP) to the address of the machine with --node_rank 0"
        )
    port: int | str = args.master_port
    if args.origin("master_port") == "default":
        port = _first(env, "PET_MASTER_PORT", "MASTER_PORT") or DEFAULT_PORT
    nodes = tuple(listed) or tuple(Node(socket.gethostname() if r == node_rank else "") for r in range(count))
    ranks = None if listed or rank_of_pod is None else _ranks_of_pod(env)
    return ManualNode(nodes, node_rank, address, port_of(port), bool(listed), ranks)


def is_pod(env: Mapping[str, str]) -> bool:
    """Whether an operator of Kubernetes started this launcher."""
    return _pods(env)[1] is not None


def _pods(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """(number of pods, which this is), as an operator of Kubernetes says."""
    if env.get("PET_NODE_RANK") and env.get("PET_NNODES"):
        if not env["PET_NNODES"].isdecimal():
            raise LaunchError(
                f"PET_NNODES={env['PET_NNODES']!r}: a number of pods that changes is not built in; name one"
            )
        return int(env["PET_NNODES"]), whole_number(env, "PET_NODE_RANK")
    if env.get("RANK") and env.get("WORLD_SIZE") and "LOCAL_RANK" not in env and env.get("MASTER_ADDR"):
        return whole_number(env, "WORLD_SIZE"), whole_number(env, "RANK")
    return None, None


def _ranks_of_pod(env: Mapping[str, str]) -> int | None:
    value = env.get("PET_NPROC_PER_NODE", "")
    return None if value in ("", "auto", "gpu", "cpu") else whole_number(env, "PET_NPROC_PER_NODE")


def _first(env: Mapping[str, str], *names: str) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)
