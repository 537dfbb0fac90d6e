"""Prints the content of a checkpoint: run, layout, and each tensor's file, name, dtype, shape and magnitude.

    python tools/ckpts/inspect_checkpoints.py checkpoints/run/global_step1000
    python tools/ckpts/inspect_checkpoints.py --checkpoint-path checkpoints/run --match final_linear
    python tools/ckpts/inspect_checkpoints.py --compare --diff checkpoints/run/global_step1000,checkpoints/b

GPT-NeoX's checkpoints can be read too. The command fails if a file differs from manifest.json, unless
--damaged is given. Code in the files is not executed.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import local, place  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "path",
        nargs="?",
        type=place,
        help="a checkpoint global_stepN, a folder of them, or one file; with --compare two of these: A,B",
    )
    parser.add_argument(
        "--checkpoint-path", "--checkpoint_path", type=place, dest="other", help="another way to give the path"
    )
    parser.add_argument(
        "--iteration",
        type=int,
        help="iteration of the checkpoint to read from a folder of them (default: the one that `latest` names)",
    )
    parser.add_argument("--match", default="", help="show only tensors whose FILE/NAME contains this text")
    parser.add_argument(
        "--damaged", action="store_true", help="also read files that differ from manifest.json, instead of failing"
    )
    parser.add_argument(
        "--attributes", nargs="*", default=[], metavar="NAME",
        help="show only values with these names, numbers and texts included; nested names are joined by /",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--compare", action="store_true", help="compare the checkpoints A and B, tensor by tensor"
    )
    parser.add_argument("-d", "--diff", action="store_true", help="with --compare: show only tensors that differ")
    parser.add_argument(
        "-i", "--interactive", action="store_true", help="then open a Python prompt with the content as `checkpoint`"
    )
    options = parser.parse_args(argv)
    if (options.path is None) == (options.other is None):
        parser.error("give exactly one path, as PATH or as --checkpoint-path PATH")
    options.path = options.path or options.other
    if options.diff and not options.compare:
        parser.error("--diff needs --compare; add --compare, or remove --diff")
    if options.compare:
        options.path = [place(part.strip()) for part in str(options.path).split(",")]
        if len(options.path) != 2:
            parser.error("--compare takes two checkpoints, separated by a comma: A,B")
    return options


def files_of(path: Path, iteration: int | None) -> tuple[Path, list[Path]]:
    """Returns (folder of a checkpoint, its tensor files *.pt) for a checkpoint, a folder of them, or one
    file.

    iteration: chooses a checkpoint in a folder; None: the latest. Raises CheckpointError if there is none."""
    from megatron.checkpointing import find_checkpoint

    if path.is_file():
        return path.parent, [path]
    files = sorted(path.glob("*.pt")) if path.is_dir() else []
    if not files:
        path = find_checkpoint(path, iteration)
        files = sorted(path.glob("*.pt"))
    return path, files


def leaves_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of each value in nested mappings that is no mapping; a name is like
    optimizer/step."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_in(item, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def select_leaves(file: str, content: Any, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the tensors in a file, or of the values that --attributes names.

    --match leaves out those whose FILE/NAME does not contain its text. file: the file's name."""
    import torch

    for name, value in leaves_in(content):
        is_named = any(name == attribute or name.startswith(f"{attribute}/") for attribute in options.attributes)
        is_selected = is_named if options.attributes else isinstance(value, torch.Tensor)
        if is_selected and options.match in f"{file}/{name}":
            yield name, value


def line(name: str, tensor: Any) -> str:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return f"  {name:48s} {tensor!r}"
    kind = f"{str(tensor.dtype).removeprefix('torch.'):9s} {list(tensor.shape)!s:16s}"
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return f"  {name:48s} {kind}"
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    root = float(norm) / tensor.numel() ** 0.5
    bad = "" if bool(norm.isfinite()) else "  NOT FINITE"
    return f"  {name:48s} {kind} rms {root:.3e}  largest {float(tensor.abs().max()):.3e}{bad}"


def describe_manifest(path: Path) -> Iterator[str]:
    """Yields lines of text that describe a checkpoint by its manifest.json: iteration, layout, model,
    versions."""
    from megatron.checkpointing import read_manifest

    manifest = read_manifest(path)
    if manifest is None:
        yield f"{path}: has no manifest.json; it may be a checkpoint of GPT-NeoX"
        return
    now = manifest.layout
    yield f"{path}: iteration {manifest.iteration}, {manifest.consumed_samples} samples, written {manifest.created}"
    yield (
        f"  layout: tensor {now.tensor}, pipeline {now.pipe}, data {now.data}, ZeRO {now.zero_stage}, {now.precision}; "
        f"optimizer state: {'yes' if manifest.optimizer else 'no'}"
    )
    yield f"  model: {', '.join(f'{key} {value}' for key, value in manifest.model.items() if value is not None)}"
    if manifest.base is not None:
        yield f"  LoRA adapters only; their base weights: {manifest.base['path'] or 'random, from the seed'}"
    yield f"  {', '.join(f'{key} {value}' for key, value in manifest.versions.items())}; run {manifest.run_id}"


def show(options: argparse.Namespace) -> None:
    """Prints the manifest and the selected tensors of a checkpoint or one file. Raises CheckpointError."""
    from megatron.checkpointing import OpenCheckpoint

    path, files = files_of(options.path, options.iteration)
    for text in describe_manifest(path):
        print(text)
    checkpoint, weights, contents = OpenCheckpoint(path, verified=not options.damaged), 0, {}
    matched: set[str] = set()
    for file in files:
        content = checkpoint.tensors(file.name)
        if file.name.endswith("model_states.pt"):
            weights += sum(numel(value) for name, value in leaves_in(content) if not name.endswith("rng_state"))
        leaves = list(select_leaves(file.name, content, options))
        matched |= {
            attribute
            for attribute in options.attributes
            for name, _ in leaves
            if f"{name}/".startswith(f"{attribute}/")
        }
        if leaves:
            print(f"{file.name} ({file.stat().st_size:,} bytes)")
        for name, value in leaves:
            print(line(name, value), flush=True)
        if options.interactive:
            contents[file.name] = content
    check_found(path, options, matched)
    if not options.attributes:
        print(f"{weights:,} weights in {len(files)} files; copies on several tensor ranks are counted several times")
    if options.interactive:
        prompt(contents if path.is_dir() and len(files) > 1 else contents[files[0].name])


def compare(options: argparse.Namespace) -> None:
    """Prints how the selected tensors of two checkpoints differ. Raises CheckpointError."""
    from megatron.checkpointing import OpenCheckpoint

    sides = [files_of(path, options.iteration) for path in options.path]
    opened = [OpenCheckpoint(path, verified=not options.damaged) for path, _ in sides]
    names = [{file.name for file in files} for _, files in sides]
    if all(path.is_file() for path in options.path):  # two files of any names
        pairs = [(sides[0][1][0].name, sides[1][1][0].name)]
    else:
        pairs = [(name, name) for name in sorted(names[0] & names[1])]
        for (path, _), unmatched in zip(sides, (names[0] - names[1], names[1] - names[0]), strict=True):
            for name in sorted(unmatched):
                print(f"{name}: only in {path}")
    matched, contents, differing = set[str](), {}, 0
    for pair in pairs:
        contents_of_pair = [side.tensors(name) for side, name in zip(opened, pair, strict=True)]
        leaves_a, leaves_b = (
            dict(select_leaves(name, file_content, options))
            for name, file_content in zip(pair, contents_of_pair, strict=True)
        )
        texts = {name: difference(leaves_a, leaves_b, name) for name in dict.fromkeys([*leaves_a, *leaves_b])}
        matched |= {
            attribute for attribute in options.attributes for name in texts if f"{name}/".startswith(f"{attribute}/")
        }
        rows = {name: text for name, text in texts.items() if text is not None or not options.diff}
        differing += sum(text is not None for text in texts.values())
        if rows:
            print(" and ".join(dict.fromkeys(pair)))
        for name, text in rows.items():
            print(f"  {name:48s} {'equal' if text is None else text}", flush=True)
        if options.interactive:
            contents[pair[0]] = contents_of_pair
    check_found(" and ".join(map(str, options.path)), options, matched)
    print(f"{differing} values differ in the {len(pairs)} files that both checkpoints have")
    if options.interactive:
        prompt(contents)


def difference(leaves_a: Mapping[str, Any], leaves_b: Mapping[str, Any], name: str) -> str | None:
    """Returns a text that says how two checkpoints differ in the value `name`; None if they are equal.

    leaves_a, leaves_b: values by name. NaN equals NaN."""
    import torch

    if name not in leaves_a or name not in leaves_b:
        return f"only in the {'first' if name in leaves_a else 'second'}"
    a, b = leaves_a[name], leaves_b[name]
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        nan = isinstance(a, float) and a != a and b != b
        return None if type(a) is type(b) and (a == b or nan) else f"{a!r} | {b!r}"
    kinds = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in (a, b)]
    if kinds[0] != kinds[1]:
        return " | ".join(kinds)
    if torch.equal(a, b):
        return None
    a, b = a.double(), b.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    if bool(equal.all()):
        return None
    return f"{kinds[0]}  largest difference {float((a - b).abs().masked_fill(equal, 0).max()):.3e}"


def check_found(place_name: Path | str, options: argparse.Namespace, matched: set[str]) -> None:
    """Raises CheckpointError if a name of --attributes is in no file. matched: names that are in a file."""
    from megatron.checkpointing import CheckpointError

    missing = [name for name in options.attributes if name not in matched]
    if missing:
        raise CheckpointError(f"{place_name}: no value is called {', '.join(missing)}; correct --attributes")


def prompt(checkpoint: Any) -> None:
    """Opens a Python prompt with the content of a checkpoint as the variable `checkpoint`."""
    import code

    import torch

    code.interact("`checkpoint` holds the content, by file name if there are several files; Ctrl-D ends",
                  local={"checkpoint": checkpoint, "torch": torch}, exitmsg="")  # fmt: skip


def numel(value: Any) -> int:
    """Returns a tensor's number of elements; 0 for any other value."""
    import torch

    return value.numel() if isinstance(value, torch.Tensor) else 0


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, ["path"]):
            (compare if options.compare else show)(options)
    except (UserError, OSError) as problem:
        sys.exit(f"inspect_checkpoints.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
