"""Describes the plan of a run: its machines, their ranks, the address where ranks meet, and their command."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node
from megatron.neox_arguments.values.local_paths import with_home
from megatron.neox_arguments.values.remote_paths import is_remote

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

# Scripts without batch sizes; they may run on numbers of ranks that do not fit the layout of training
_WITHOUT_BATCH = ("eval", "generate", "serve")


@dataclass(frozen=True)
class Run:
    """The plan of a run. It is only data: the functions of `runners` compute a command line from it, `start`
    executes it.

    launcher: local, nodes (one launcher per machine, typed there by hand), pdsh, openmpi, mvapich, slurm or
        torchrun.
    command: the command of a rank: Python, -u, the script and its arguments.
    nodes: the machines in order of their ranks.
    args_file: the file of resolved arguments, which ranks read.
    node_rank: index of this machine in `nodes`, for the launchers nodes and torchrun.
    master_port: None: any free port.
    environment: variables that must be sent to other machines.
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
    total_ranks: int | None = None  # value of TOTAL_GPUS; None: unset
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        """Returns this machine's entry of `nodes`."""
        return self.nodes[self.node_rank]

    @property
    def world_size(self) -> int:
        """Returns the number of ranks on all machines. A machine whose number of ranks is not known yet
        counts as 0."""
        return sum(node.ranks or 0 for node in self.nodes)

    @property
    def trains(self) -> bool:
        """Returns whether the script trains a model. Only then must the layout fit the number of ranks."""
        return Path(self.command[2]).stem not in _WITHOUT_BATCH

    def for_world(self, world_size: int) -> "Run":
        """Returns the run with its batch sizes computed for `world_size` ranks; the run itself if the script
        does not train.

        Raises ConfigError if the layout does not fit this number. Raised here, the error appears only once,
        not in every rank.
        """
        return replace(self, args=self.args.for_world(world_size)) if self.trains else self


def make_folders(run: Run) -> None:
    """Creates the folder `log_dir`, and for a training script the folder `save` unless that is a bucket.

    Raises LaunchError if one cannot be written."""
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
            fix = "set another folder" if run.trains and key else "set log_dir to a folder that you can write to"
            raise LaunchError(f"{place}{folder}: cannot be written ({reason}); {fix}") from None


def write_args_file(run: Run) -> None:
    """Writes the file of resolved arguments that every rank reads.

    If the file already has this text, it is not written again, because the disk may be full by now. Raises
    LaunchError if it cannot be written.
    """
    text = run.args.to_json()
    if not run.args_file.exists() or run.args_file.read_text(encoding="utf-8") != text:
        write_text(run.args_file, text, private=True)  # it has what the user wrote, passwords of URLs too


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Writes a file, and creates its folder. Raises LaunchError if it cannot be written.

    private: only the user may read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if private:
            path.touch(0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise LaunchError(f"{path}: cannot be written ({problem.strerror}); set another log_dir") from None


def log_dir_of(args: "NeoXArgs") -> Path:
    """Returns the folder of a run's logs: `log_dir`, else `logs` inside `save` if that is local, else `logs`
    in the working folder."""
    local = local_save(args)
    return with_home(args.log_dir or (Path(local) / "logs" if local else "logs"))


def local_save(args: "NeoXArgs") -> str | None:
    """Returns the value of the key `save`; None if it is unset or remote (a bucket)."""
    return args.save if not is_remote(args.save) else None
