"""Finds this machine's place in a run for which the same command line is typed on each machine."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.launch.environment import DEFAULT_PORT, MOST_NODES, ONE_PER_GPU, LaunchError, port_of, read_integer
from megatron.launch.hosts import Node
from megatron.launch.typed_variables import resolve_main_node
from megatron.neox_arguments.values.integers import parse_integer

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class ManualNode:
    """This machine's place in a run for which the same command line is typed on each machine.

    nodes: all machines of the run.
    node_rank: index of this machine.
    in_host_list: whether a hostfile or `--hosts` names this machine's GPUs. If not, they are chosen here.
    ranks: number of ranks on this machine, if the list or a Kubernetes operator sets it.
    """

    nodes: tuple[Node, ...]
    node_rank: int
    master_addr: str
    master_port: int
    in_host_list: bool
    ranks: int | None


def find_manual_node(
    args: "NeoXArgs", node_rank: int | None, host_nodes: Sequence[Node], hosts: Sequence[str], env: Mapping[str, str]
) -> ManualNode | None:
    """Returns this machine's place in the run; None unless the same command line is typed on each of several
    machines.

    The place is read from keys and flags, then from MAIN_NODE_IP, then from the variables of Kubernetes
    operators: PET_NNODES, PET_NODE_RANK and PET_NPROC_PER_NODE, or RANK and WORLD_SIZE. If LOCAL_RANK is
    unset, RANK and WORLD_SIZE count pods.

    host_nodes: the machines of a hostfile or of `--hosts`. Raises LaunchError for incomplete or contradictory
    values.
    """
    nodes_of_pods, rank_of_pod = _pods(env)
    if node_rank is None and read_integer(env, "WORLD_SIZE", 1) > 1 and {"RANK", "LOCAL_RANK"} <= set(env):
        raise LaunchError(
            f"RANK={env['RANK']}, LOCAL_RANK={env['LOCAL_RANK']} and WORLD_SIZE={env['WORLD_SIZE']} are set, so this "
            "process is a rank already; start the script itself instead of deepy.py, or unset these variables"
        )
    node_rank = rank_of_pod if node_rank is None else node_rank
    count = args.num_nodes if args.num_nodes > 1 else len(host_nodes) or nodes_of_pods or 1
    if node_rank is None:
        if hosts and count > 1:
            raise LaunchError(
                "--hosts does not start ranks on other machines; on each machine type the line that --dry-run prints "
                "for it, or set hostfile to start ranks over ssh"
            )
        if count > 1 and not host_nodes:
            raise LaunchError(
                f"num_nodes: {count}, but nothing says which machine this is; add --node_rank (0 to {count - 1}) "
                "and --master_addr, or a hostfile to start ranks over ssh"
            )
        return None
    if not 0 <= node_rank < count:
        raise LaunchError(f"node_rank: {node_rank} is not in 0 to {count - 1}; correct it, or --num_nodes ({count})")
    if count > MOST_NODES:
        raise LaunchError(f"{count} machines are asked for, more than {MOST_NODES}; correct num_nodes or PET_NNODES")
    address = args.master_addr or resolve_main_node(env, [node.host for node in host_nodes])
    address = address or env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    address = address or (host_nodes[0].host if host_nodes else "127.0.0.1" if count == 1 else None)
    if address is None:
        raise LaunchError(
            "node_rank: the address of node 0 is unknown; set master_addr (or MAIN_NODE_IP) to the address of the "
            "machine with --node_rank 0"
        )
    port = args.master_port
    if args.origin("master_port") == "default":
        name = "PET_MASTER_PORT" if env.get("PET_MASTER_PORT") else "MASTER_PORT"
        port = port_of(env.get(name) or DEFAULT_PORT, name)
    nodes = tuple(host_nodes) or tuple(Node(socket.gethostname() if r == node_rank else "") for r in range(count))
    ranks = nodes[node_rank].ranks
    if not host_nodes and rank_of_pod is not None and env.get("PET_NPROC_PER_NODE", "") not in ("", *ONE_PER_GPU):
        ranks = read_integer(env, "PET_NPROC_PER_NODE")
    return ManualNode(nodes, node_rank, address, port, bool(host_nodes), ranks)


def is_pod(env: Mapping[str, str]) -> bool:
    """Returns whether a Kubernetes operator started this launcher."""
    return _pods(env)[1] is not None


def _pods(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Returns (number of pods, index of this pod) from the variables of a Kubernetes operator; (None, None)
    outside a pod."""
    if env.get("PET_NODE_RANK") and env.get("PET_NNODES"):
        if (nodes := parse_integer(env["PET_NNODES"])) is None:
            raise LaunchError(
                f"PET_NNODES={env['PET_NNODES']!r}: elastic jobs are not supported; set a fixed number of pods"
            )
        return nodes, read_integer(env, "PET_NODE_RANK")
    if env.get("RANK") and env.get("WORLD_SIZE") and "LOCAL_RANK" not in env and env.get("MASTER_ADDR"):
        return read_integer(env, "WORLD_SIZE"), read_integer(env, "RANK")
    return None, None
