"""Provides the checkpoint commands with common flags, the source checkpoint, progress bars and remote
folders."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.weight_names import WEIGHT_NAMINGS
from megatron.neox_arguments.values.remote_paths import is_remote

if TYPE_CHECKING:
    from megatron.checkpointing import CheckpointDescription

PRECISIONS = {"auto": None, "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}  # of --precision: torch's names


def add_source_flags(parser: argparse.ArgumentParser, output: str) -> None:
    """Adds --input_dir, --iteration, --config_file, --gqa-rows and --output_dir to a command.

    output: help text of --output_dir."""
    parser.add_argument(
        "--input_dir", "--input-dir", type=place, required=True, help="a checkpoint global_stepN, or a folder of them"
    )
    parser.add_argument(
        "--iteration",
        type=int,
        help="iteration of the checkpoint to use from a folder of them (default: the one that `latest` names)",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        action="extend",
        nargs="+",
        default=[],
        help="configuration files of the model (default: the configuration in the checkpoint)",
    )
    parser.add_argument(
        "--gqa-rows",
        choices=["pre1315", "post1315"],
        help="order of the rows in GPT-NeoX's GQA weights, as the key compat_gqa_rows (docs/configuration.md)",
    )
    parser.add_argument("--output_dir", "--output-dir", type=place, required=True, help=output)


def add_names_flag(parser: argparse.ArgumentParser, default: str | None, words: str) -> None:
    """Adds --names, the naming of weights in the written checkpoint. words: description of the default, for
    help."""
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in WEIGHT_NAMINGS.items())
    parser.add_argument(
        "--names", choices=WEIGHT_NAMINGS, default=default, help=f"naming of the weights. {meanings} (default: {words})"
    )


def source_of(options: argparse.Namespace) -> tuple[Path, NeoXArgs, "CheckpointDescription"]:
    """Returns the checkpoint that --input_dir and --iteration name: (folder, configuration, facts on its
    files).

    options: flags of `add_source_flags`. Raises CheckpointError, ConfigError.
    """
    from megatron.checkpointing import CheckpointError, find_checkpoint, load_checkpoint_args, read_manifest

    is_checkpoint = any(file for kind in ("mp_rank_*", "layer_*") for file in options.input_dir.glob(kind))
    source = options.input_dir if is_checkpoint else find_checkpoint(options.input_dir, options.iteration)
    args, facts = load_checkpoint_args(source, options.config_file)
    if options.gqa_rows is not None:
        if read_manifest(source) is not None:
            raise CheckpointError(f"{source}: the order of GQA rows is in its manifest.json already; remove --gqa-rows")
        args = args.replace(compat_gqa_rows=options.gqa_rows)
    return source, args, facts


def progress(layers: Iterable[int], count: int) -> Iterable[int]:
    """Returns an iterator over `layers` that shows a progress bar on a terminal. count: number of layers."""
    return tqdm(layers, total=count, unit="layer", file=sys.stderr, disable=None)


def progress_then_check(layers: Iterable[int], count: int) -> Iterable[int]:
    """Yields `layers` with a progress bar; after the last, prints that logits are compared with
    transformers."""
    yield from progress(layers, count)
    print("comparing logits of a fixed batch with transformers", flush=True)


def add_dry_run_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --dry-run, with which a command only prints the files that it would write."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the files that would be written with their sizes, and write nothing",
    )


def print_plan(files: Mapping[str, int]) -> None:
    """Prints a line with name and size for each file, and a line with the sum. files: size in bytes by
    name."""
    from megatron.checkpointing import readable_size

    for name, size in files.items():
        print(f"{readable_size(size):>12}  {name}")
    print(f"{readable_size(sum(files.values())):>12}  {len(files)} files")


def place(text: str) -> Path | str:
    """Converts a command-line argument to a Path; a remote address such as s3://... stays a string."""
    return text if is_remote(text) else Path(text)


@contextmanager
def local(options: argparse.Namespace, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> Iterator[None]:
    """Within the block, replaces remote addresses such as s3://... in `options` by local folders.

    reads: names of options whose folders are downloaded at the start of the block. writes: names of options
    whose folders are uploaded at its end. Raises CheckpointError.
    """
    from megatron.checkpointing.remote_staging import local_copy, upload_on_exit

    original = {name: getattr(options, name) for name in (*reads, *writes)}
    with ExitStack() as stack:
        for name in reads:
            value, iteration = original[name], getattr(options, "iteration", None)
            paths = value if isinstance(value, list) else [value]
            local_paths = [
                stack.enter_context(local_copy(path, iteration)) if is_remote(str(path)) else path for path in paths
            ]
            setattr(options, name, local_paths if isinstance(value, list) else local_paths[0])
        for name in writes:
            if is_remote(str(original[name])):
                setattr(options, name, stack.enter_context(upload_on_exit(original[name])))
        try:
            yield
        finally:
            for name, value in original.items():
                setattr(options, name, value)
    for name in writes:
        if is_remote(str(original[name])):
            print(f"{original[name]}: uploaded")
