"""What is in a checkpoint: its run and layout, and every tensor's file, name, dtype, shape and size of its
values.

    python tools/ckpts/inspect_checkpoints.py checkpoints/run/global_step1000
    python tools/ckpts/inspect_checkpoints.py --checkpoint-path checkpoints/run --match final_linear

Reads GPT-NeoX's checkpoints too. A file that is not as manifest.json says is refused, unless --damaged is
given. Nothing that a file asks to run is run.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import local, place  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=place, help="a global_stepN, their folder, or one file")
    parser.add_argument("--checkpoint-path", "--checkpoint_path", type=place, dest="other", help="the same by name")
    parser.add_argument("--iteration", type=int, help="which one of a folder; unset: the one `latest` names")
    parser.add_argument("--match", default="", help="only tensors whose file or name has this in it")
    parser.add_argument("--damaged", action="store_true", help="show files that are not as manifest.json says, too")
    options = parser.parse_args(argv)
    if (options.path is None) == (options.other is None):
        parser.error("give one path: PATH or --checkpoint-path PATH")
    options.path = options.path or options.other
    return options


def files_of(path: Path, iteration: int | None) -> tuple[Path, list[Path]]:
    """(the checkpoint, or the folder of the file; its tensor files). Raises CheckpointError."""
    from megatron.checkpointing import find_checkpoint

    if path.is_file():
        return path.parent, [path]
    files = sorted(path.glob("*.pt")) if path.is_dir() else []
    if not files:
        path = find_checkpoint(path, iteration)
        files = sorted(path.glob("*.pt"))
    return path, files


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, "Tensor"]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}/{key}" if name else str(key))


def line(name: str, tensor: "Tensor") -> str:
    import torch

    kind = f"{str(tensor.dtype).removeprefix('torch.'):9s} {list(tensor.shape)!s:16s}"
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return f"  {name:48s} {kind}"
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    root = float(norm) / tensor.numel() ** 0.5
    bad = "" if bool(norm.isfinite()) else "  NOT FINITE"
    return f"  {name:48s} {kind} rms {root:.3e}  largest {float(tensor.abs().max()):.3e}{bad}"


def about(path: Path) -> Iterator[str]:
    """The content of a manifest as lines of text."""
    from megatron.checkpointing import read_manifest

    manifest = read_manifest(path)
    if manifest is None:
        yield f"{path}: no manifest.json, as GPT-NeoX's"
        return
    now = manifest.layout
    yield f"{path}: iteration {manifest.iteration}, {manifest.consumed_samples} samples, written {manifest.created}"
    yield (
        f"  layout: tensor {now.tensor}, pipeline {now.pipe}, data {now.data}, ZeRO {now.zero_stage}, {now.precision}; "
        f"optimizer state: {'yes' if manifest.optimizer else 'no'}"
    )
    yield f"  model: {', '.join(f'{key} {value}' for key, value in manifest.model.items() if value is not None)}"
    if manifest.base is not None:
        yield f"  adapters alone, over the weights of {manifest.base['path'] or 'a fresh start'}"
    yield f"  {', '.join(f'{key} {value}' for key, value in manifest.versions.items())}; run {manifest.run_id}"


def show(options: argparse.Namespace) -> None:
    """Raises CheckpointError."""
    from megatron.checkpointing import OpenCheckpoint

    path, files = files_of(options.path, options.iteration)
    for text in about(path):
        print(text)
    checkpoint, weights = OpenCheckpoint(path, verified=not options.damaged), 0
    for file in files:
        tensors = list(tensors_in(checkpoint.tensors(file.name)))
        shown = [(name, tensor) for name, tensor in tensors if options.match in f"{file.name}/{name}"]
        if file.name.endswith("model_states.pt"):
            weights += sum(tensor.numel() for name, tensor in tensors if not name.endswith("rng_state"))
        if shown:
            print(f"{file.name} ({file.stat().st_size:,} bytes)")
        for name, tensor in shown:
            print(line(name, tensor), flush=True)
    print(f"{weights:,} numbers in {len(files)} files' weights, copies of tensor ranks counted each")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, ["path"]):
            show(options)
    except (UserError, OSError) as problem:
        sys.exit(f"inspect_checkpoints.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
