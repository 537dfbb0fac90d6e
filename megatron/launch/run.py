"""One description of a run: which machines, how many ranks on each, where they meet and what every rank
runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node
from megatron.neox_arguments.values.remote_paths import is_remote

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

# Scripts that need none, and may run where training's does not fit
_WITHOUT_BATCH = ("eval", "generate", "serve")


@dataclass(frozen=True)
class Run:
    """What to start, and how. A renderer is a pure function of it; `start` alone does something.

    launcher: local, nodes (one launcher a machine, typed there by hand), pdsh, openmpi, mvapich, slurm or
    torchrun. nodes: the machines in order of their ranks; `node_rank` is this one, for nodes and torchrun.
    master_port: None where any free port will do. environment: what a starter must carry to other machines.
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

    @property
    def trains(self) -> bool:
        """Whether the script takes optimizer steps: only then must the layout fit the number of ranks."""
        return Path(self.command[2]).stem not in _WITHOUT_BATCH

    def for_world(self, world_size: int) -> "Run":
        """The run on so many ranks: what does not fit is refused once, not by every rank. Raises
        ConfigError."""
        return replace(self, args=self.args.for_world(world_size)) if self.trains else self


def make_folders(run: Run) -> None:
    """Make what the ranks will write to, `log_dir` and a local `save`. Raises LaunchError where they could
    not."""
    args = run.args
    folders = {run.log_dir: "log_dir" if args.log_dir else "save" if local_save(args) else None}
    if run.trains and local_save(args):
        folders = {Path(local_save(args) or ""): "save", **folders}
    for folder, key in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as problem:
            reason = "it is a file" if folder.is_file() else problem.strerror
            place = f"{args.origin(key)}: {key}: " if key else ""
            fix = "set another" if run.trains and key else "set log_dir to a folder where logs may be written"
            raise LaunchError(f"{place}{folder}: cannot be written ({reason}); {fix}") from None


def write_args_file(run: Run) -> None:
    """Write the file of resolved arguments that every rank reads; an earlier start's stays as it is where
    nothing has changed, for its disk may be full by now. Raises LaunchError."""
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


def log_dir_of(args: "NeoXArgs") -> Path:
    """The folder of a run's logs: log_dir, else `logs` within a local save, else `logs` here."""
    local = local_save(args)
    return Path(args.log_dir or (Path(local) / "logs" if local else "logs"))


def local_save(args: "NeoXArgs") -> str | None:
    """The folder `save`, unless it is a bucket or unset."""
    return args.save if not is_remote(args.save) else None
