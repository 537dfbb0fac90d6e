"""Start a command's ranks on this machine: one per GPU found, or gloo processes where there is none."""

import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron.launch.environment import LaunchError, ProcessInfo
from megatron.launch.watch import Outcome, watch_ranks
from megatron.neox_arguments.places import is_remote

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

ARGS_FLAG = "--neox-args"
_WITHOUT_BATCH = ("eval", "generate", "serve")  # scripts that need none, and may run where training's does not fit


@dataclass(frozen=True)
class LocalRun:
    """What to start here: every rank runs `command`, its output goes to `log_dir/rank_<r>.log`."""

    command: tuple[str, ...]
    world_size: int
    log_dir: Path
    devices: tuple[str, ...] = ()  # entries of CUDA_VISIBLE_DEVICES; empty on a machine without GPUs
    master_addr: str = "127.0.0.1"
    master_port: int | None = None  # None: any free port
    watched: bool = False  # also a single rank gets a launcher that sees how it ends

    def environment(self, rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """Variables of one rank: `base` and its place in the run. What the user has set is kept."""
        here = ProcessInfo(rank, self.world_size, rank, self.world_size, self.master_addr, port, starter="torchrun")
        env = {**base, **here.variables()}
        if self.devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.world_size > 1:
            # Each rank would otherwise take every core.
            env.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self.world_size)))
            if sys.platform == "linux" and not self.devices:
                # gloo asks the resolver for this machine's name, which laptops and containers often cannot answer.
                env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return env


def launch_local(script: str | Path, args: "NeoXArgs", script_args: Sequence[str] = ()) -> int:
    """Run `script` on this machine as `args` ask; the exit code of the run. With one rank and no `max_restarts` this
    call does not return.

    A run that failed is started again up to `max_restarts` times; its ranks find the number in NEOX_RESTARTS. The
    resolved args reach the ranks through a file `<log_dir>/neox_args.<script>.*.json`, named by the flag `--neox-args`.
    Raises LaunchError for GPUs that are not there and a port that is taken, ConfigError for a layout that does not fit.
    """
    saved, restarts = _latest(args), 0
    while True:
        outcome = run_local(plan_local(script, args, script_args), restarts)
        if not outcome.repeatable or restarts == args.max_restarts:
            return outcome.code
        restarts += 1
        sys.stderr.write(f"deepy.py: restart {restarts} of {args.max_restarts} after {outcome.reason}\n")
        sys.stderr.flush()
        if _latest(args) != saved and (args.restart or args.iteration is not None):
            # These said how the run starts; it has saved since, and goes on from there.
            args = args.replace(restart=False, iteration=None)


def plan_local(script: str | Path, args: "NeoXArgs", script_args: Sequence[str] = ()) -> LocalRun:
    """How `launch_local` would start `script`; writes the args file."""
    script = Path(script)
    wanted = args.num_gpus
    if args.hostfile and wanted is None:
        wanted = hostfile_slots(args.hostfile)
    world_size, devices = choose_ranks(visible_gpus(os.environ), wanted, args.include, args.exclude)
    if script.stem not in _WITHOUT_BATCH:  # what does not fit is refused once, not by every rank
        args = args.for_world(world_size)
    port = None if args.origin("master_port") == "default" else args.master_port
    local = args.save if not is_remote(args.save) else None
    log_dir = Path(args.log_dir or (Path(local) / "logs" if local else "logs"))
    log_dir.mkdir(parents=True, exist_ok=True)
    # A name of its own: runs may share log_dir, and ranks read the file seconds later.
    started = time.strftime("%Y%m%d-%H%M%S")
    args_file = log_dir / f"neox_args.{script.stem}.{started}.{socket.gethostname()}.{os.getpid()}.json"
    args_file.write_text(args.to_json(), encoding="utf-8")
    # -u: a log line must reach the log when it is printed, not when a buffer is full
    command = (sys.executable, "-u", str(script), ARGS_FLAG, str(args_file), *script_args)
    address = args.master_addr or "127.0.0.1"
    return LocalRun(command, world_size, log_dir, devices, address, port, watched=args.max_restarts > 0)


def run_local(run: LocalRun, restarts: int = 0) -> Outcome:
    """Start all ranks, watch them to the end. One rank that need not be watched replaces this process."""
    port, base = _port(run.master_port, os.environ), {**os.environ, "NEOX_RESTARTS": str(restarts)}
    if run.world_size == 1 and not run.watched:
        _become(run.command, run.environment(0, port, base))
    environments = [run.environment(rank, port, base) for rank in range(run.world_size)]
    run.log_dir.mkdir(parents=True, exist_ok=True)
    return watch_ranks(run.command, environments, run.log_dir)


def _latest(args: "NeoXArgs") -> int | None:
    """When the run last finished a checkpoint, in ns; None before the first."""
    try:
        return (Path(args.save_dir) / "latest").stat().st_mtime_ns if args.save_dir else None
    except FileNotFoundError:
        return None


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


def hostfile_slots(path: str | Path) -> int:
    """Ranks that a hostfile gives this machine: its only line is `localhost slots=N`, or this machine's name.

    Raises LaunchError for other machines: ranks are started here only.
    """
    slots = None
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise LaunchError(f"hostfile: {path} cannot be read ({problem.strerror})") from None
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None:
            raise LaunchError(f"{path}:{number}: {line!r} is not of the form `host slots=N`")
        if slots is not None or match[1] not in _local_names():
            raise LaunchError(
                f"{path}:{number}: {match[1]} is another machine; ranks are started on this one only. "
                "Start train.py on all of them with torchrun, srun or mpirun instead"
            )
        slots = int(match[2])
    if not slots:
        raise LaunchError(f"hostfile: {path} gives this machine no slots; write `localhost slots=N`")
    return slots


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # takes a second: only when ranks are counted

    count = torch.cuda.device_count()
    named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


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


def _port(wanted: int | None, env: Mapping[str, str]) -> int:
    """The rendezvous port: `wanted` or MASTER_PORT if they are free, else any free one."""
    source = "master_port"
    if wanted is None and env.get("MASTER_PORT"):
        source = "MASTER_PORT in the environment"
        if not env["MASTER_PORT"].isdecimal():
            raise LaunchError(f"{source} is {env['MASTER_PORT']!r}, not a port number")
        wanted = int(env["MASTER_PORT"])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except (OSError, OverflowError) as problem:
            raise LaunchError(
                f"{source}: port {wanted} cannot be used ({problem}); set another, or none: then a free one is taken"
            ) from None
        return probe.getsockname()[1]


def _become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process: with one rank nothing needs to be watched."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), dict(env))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
