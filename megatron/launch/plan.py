"""One description of a run: which machines, how many ranks on each, where they meet and what every rank runs."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from megatron.launch.devices import choose_ranks, cores, is_here, visible_gpus
from megatron.launch.environment import DEFAULT_PORT, LaunchError
from megatron.launch.hosts import Node, carried, hosts_of
from megatron.launch.manual_nodes import ByHand, by_hand
from megatron.launch.slurm import allocation, has_slurm, job_port, need_gpus, step_node
from megatron.neox_arguments.compat.methods import ARGS_FLAG
from megatron.neox_arguments.values.remote_paths import is_remote

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

_WITHOUT_BATCH = ("eval", "generate", "serve")  # scripts that need none, and may run where training's does not fit


@dataclass(frozen=True)
class Run:
    """What to start, and how. A renderer is a pure function of it; `start` alone does something.

    launcher: local, nodes (one launcher a machine, typed there by hand), pdsh, openmpi, mvapich, slurm or torchrun.
    nodes: the machines in order of their ranks; `node_rank` is this one, for nodes and torchrun. master_port: None
    where any free port will do. environment: what a starter must carry to other machines.
    """

    launcher: str
    command: tuple[str, ...]
    nodes: tuple[Node, ...]
    log_dir: Path
    args: "NeoXArgs"
    args_file: Path
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    total_ranks: int | None = None  # what TOTAL_GPUS says
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        """This machine."""
        return self.nodes[self.node_rank]

    @property
    def world_size(self) -> int:
        """Ranks on all machines; of machines that count their own GPUs when they come, none."""
        return sum(node.ranks or 0 for node in self.nodes)


def plan(
    script: str | Path,
    args: "NeoXArgs",
    script_args: Sequence[str] = (),
    node_rank: int | None = None,
    hosts: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    args_file: Path | None = None,
) -> Run:
    """How `script` is to be started as `args`, the environment and the flags `--node_rank` and `--hosts` say;
    nothing is written and nothing started. args_file: that of an earlier start.

    Raises LaunchError for machines and GPUs that are not there or contradict each other, ConfigError for a layout that
    does not fit their number.
    """
    env = os.environ if env is None else env
    script = Path(script)
    args_file = args_file or _log_dir(args) / _name_of_args_file(script)
    # -u: a log line must reach the log when it is printed, not when a buffer is full
    command = (sys.executable, "-u", str(script), ARGS_FLAG, str(args_file), *script_args)
    port = None if args.origin("master_port") == "default" else args.master_port
    run = Run(
        "local", command, (), _log_dir(args), args, args_file,
        master_addr=args.master_addr or "127.0.0.1", master_port=port,
    )  # fmt: skip
    wanted = _launcher(args)
    step = step_node(env, started_by_us=bool(hosts)) if wanted == "slurm" else None
    if step is not None:
        node_rank = step if hosts else node_rank
        if args.distributed_backend != "gloo":
            need_gpus(env, visible_gpus(env))
    if wanted == "slurm" and step is None and has_slurm(args, env):
        nodes = allocation(args, env)
        address = args.master_addr or env.get("MASTER_ADDR") or nodes[0].host
        run = replace(run, launcher="slurm", nodes=nodes, master_addr=address, master_port=port or job_port(env))
    else:
        # A hostfile that nobody named says nothing to somebody who types on each machine.
        typed = node_rank is not None and not hosts and not args.hostfile
        known = () if typed else hosts_of(args, hosts, env)
        hand = by_hand(args, node_rank, known, hosts, env)
        if hand is not None:
            run = _nodes(run, args, hand, wanted, env)
        elif known and (len(known) > 1 or args.force_multi or not is_here(known[0].host)):
            run = _over_hosts(run, args, known, wanted, env)
        else:
            run = replace(run, launcher="torchrun" if wanted == "torchrun" else "local", nodes=_here(args, known, env))
    if all(node.ranks for node in run.nodes):
        if run.total_ranks not in (None, run.world_size):
            raise LaunchError(f"TOTAL_GPUS is {run.total_ranks}, but the machines have {run.world_size} ranks")
        run = fit(run, run.world_size)
    return run


def fit(run: Run, world_size: int) -> Run:
    """The run on so many ranks: what does not fit is refused once, not by every rank. Raises ConfigError."""
    if not _trains(run):
        return run
    return replace(run, args=run.args.for_world(world_size))


def make_folders(run: Run) -> None:
    """Make what the ranks will write to, `log_dir` and a local `save`. Raises LaunchError where they could not."""
    args = run.args
    folders = {run.log_dir: "log_dir" if args.log_dir else "save" if _local_save(args) else None}
    if _trains(run) and _local_save(args):
        folders = {Path(_local_save(args) or ""): "save", **folders}
    for folder, key in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as problem:
            reason = "it is a file" if folder.is_file() else problem.strerror
            place = f"{args.origin(key)}: {key}: " if key else ""
            fix = "set another" if _trains(run) and key else "set log_dir to a folder where logs may be written"
            raise LaunchError(f"{place}{folder}: cannot be written ({reason}); {fix}") from None


def hand_over(run: Run) -> None:
    """Write the file of resolved arguments that every rank reads; an earlier start's stays as it is where nothing has
    changed, for its disk may be full by now. Raises LaunchError."""
    text = run.args.to_json()
    if not run.args_file.exists() or run.args_file.read_text(encoding="utf-8") != text:
        write_text(run.args_file, text)


def write_text(path: Path, text: str) -> None:
    """Write a file that ranks or starters read. Raises LaunchError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise LaunchError(f"{path}: cannot be written ({problem.strerror}); set another log_dir") from None


def _trains(run: Run) -> bool:
    return Path(run.command[2]).stem not in _WITHOUT_BATCH


def _launcher(args: "NeoXArgs") -> str:
    """GPT-NeoX's two switches say the same as the key."""
    if args.deepspeed_slurm and args.deepspeed_mpi:
        raise LaunchError("deepspeed_slurm and deepspeed_mpi are both true; one of them starts the ranks")
    return "slurm" if args.deepspeed_slurm else "openmpi" if args.deepspeed_mpi else args.launcher


def _gpus(args: "NeoXArgs", env: Mapping[str, str]) -> list[str]:
    """GPUs that ranks of this machine may take; none where the run is asked to work on CPUs."""
    return [] if args.distributed_backend == "gloo" else visible_gpus(env)


def _here(args: "NeoXArgs", known: Sequence[Node], env: Mapping[str, str]) -> tuple[Node]:
    """The ranks of this machine, when it is the only one."""
    include, exclude, wanted = args.include, args.exclude, args.num_gpus
    if known:  # include and exclude have chosen among its slots
        include, exclude = known[0].include(), None
        wanted = known[0].ranks if wanted is None else wanted
    count, devices = choose_ranks(_gpus(args, env), wanted, include, exclude)
    return (Node(socket.gethostname(), count, devices),)


def _nodes(run: Run, args: "NeoXArgs", hand: ByHand, wanted: str, env: Mapping[str, str]) -> Run:
    """This machine among several on which the same line is typed."""
    count, devices = choose_ranks(_gpus(args, env), hand.ranks, hand.include, hand.exclude)
    nodes = list(hand.nodes)
    if len(nodes) == 1:
        return replace(run, nodes=(Node(nodes[0].host, count, devices),), total_ranks=hand.total_ranks)
    nodes[hand.node_rank] = replace(nodes[hand.node_rank], ranks=count, devices=devices)
    return replace(
        run, launcher="torchrun" if wanted == "torchrun" else "nodes", nodes=tuple(nodes), node_rank=hand.node_rank,
        master_addr=hand.master_addr, master_port=hand.master_port, total_ranks=hand.total_ranks,
    )  # fmt: skip


def _over_hosts(run: Run, args: "NeoXArgs", known: Sequence[Node], wanted: str, env: Mapping[str, str]) -> Run:
    """Other machines, reached over ssh or by MPI."""
    if wanted in ("slurm", "torchrun"):
        where = "inside sbatch or salloc" if wanted == "slurm" else "on each machine, with --node_rank 0, 1, ..."
        raise LaunchError(
            f"launcher: {wanted} is used {where}; pdsh, openmpi and mvapich start ranks on other machines"
        )
    address = args.master_addr or known[0].host
    if address in ("localhost", "127.0.0.1") and not all(is_here(node.host) for node in known):
        address = socket.gethostname()
    environment = carried(env)
    if wanted != "pdsh":  # with pdsh a launcher on each machine sees to it
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(node.ranks or 1 for node in known))))
    return replace(
        run, launcher=wanted, nodes=tuple(known), master_addr=address, master_port=run.master_port or DEFAULT_PORT,
        environment=environment,
    )  # fmt: skip


def _log_dir(args: "NeoXArgs") -> Path:
    local = _local_save(args)
    return Path(args.log_dir or (Path(local) / "logs" if local else "logs"))


def _local_save(args: "NeoXArgs") -> str | None:
    return args.save if not is_remote(args.save) else None


def _name_of_args_file(script: Path) -> str:
    # A name of its own: runs may share log_dir, and ranks read the file seconds later.
    return f"neox_args.{script.stem}.{time.strftime('%Y%m%d-%H%M%S')}.{socket.gethostname()}.{os.getpid()}.json"
