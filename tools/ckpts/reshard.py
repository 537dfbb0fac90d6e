"""Reshards a checkpoint for other parallel sizes, with its optimizer state, one layer in memory at a time.

    python tools/ckpts/reshard.py --input_dir checkpoints/run/global_step1000 --output_dir resharded --tp 4 --pp 2

A run does not need it: it reshards a checkpoint of other parallel sizes when it loads it. The new checkpoint
appears only when it is complete. After an interruption, run the same command again.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import add_names_flag, add_source_flags, local, progress, source_of  # noqa: E402


def parser(tp: int | None, pp: int | None, description: str | None) -> argparse.ArgumentParser:
    """Returns the command-line parser. tp, pp: defaults of --tp and --pp; None: the checkpoint's sizes."""
    command_line = CommandParser(description=description)
    add_source_flags(command_line, "folder in which the new checkpoint is written")
    command_line.add_argument(
        "--tp", type=int, default=tp, help=f"new tensor-parallel size (default: {tp or 'as in the checkpoint'})"
    )
    pp_help = (
        f"new number of pipeline stages (default: {pp or 'as in the checkpoint'}); 0: GPT-NeoX's without a pipeline"
    )
    command_line.add_argument("--pp", type=int, default=pp, help=pp_help)
    command_line.add_argument(
        "--dp", type=int, help="data-parallel size to write into the manifest; the files do not depend on it"
    )
    command_line.add_argument(
        "--zero-stage",
        type=int,
        choices=range(4),
        help="ZeRO stage to write into the manifest; the files do not depend on it",
    )
    add_names_flag(command_line, None, "the names that GPT-NeoX uses with the checkpoint's configuration")
    command_line.add_argument("--no-optimizer", action="store_true", help="leave out the optimizer state")
    return command_line


def convert(options: argparse.Namespace) -> None:
    """Writes a checkpoint again for other parallel sizes, as the command-line options say.

    Raises CheckpointError, ConfigError."""
    from megatron.checkpointing import CheckpointError, ParallelLayout, describe_layout, read_manifest, reshard
    from megatron.checkpointing.layout import layer_files

    for name, minimum in (("tp", 1), ("pp", 0), ("dp", 1)):
        if getattr(options, name) is not None and getattr(options, name) < minimum:
            raise CheckpointError(f"--{name}: the number must be at least {minimum}")
    source, args, facts = source_of(options)
    manifest = read_manifest(source)
    now = manifest.layout if manifest is not None else ParallelLayout(args.pp, 1, facts.tensor_size, 0, "fp32", 1)
    pipe = max(now.pipe if options.pp is None else options.pp, 1)
    tensor, data = options.tp or now.tensor, options.dp or now.data
    stage = now.zero_stage if options.zero_stage is None else options.zero_stage
    sequential = options.pp == 0 or options.pp is None and not layer_files(source)
    print(f"{source}: {describe_layout(source, args)}", flush=True)
    path = reshard(
        source, options.output_dir, args,
        ParallelLayout(pipe, data, tensor, stage, now.precision, pipe * tensor * data),
        optimizer=not options.no_optimizer, sequential=sequential, naming=options.names, progress=progress,
    )  # fmt: skip
    print(f"{path}: tensor {tensor}, pipeline {pipe}, data {data}, ZeRO {stage}; {describe_layout(path, args)}")
    if manifest is None and options.no_optimizer:
        print(f"{path}: has weights only; a run that loads it starts at iteration 0")


def run(command: str, argv: Sequence[str] | None, command_line: argparse.ArgumentParser) -> None:
    options = command_line.parse_args(argv)
    try:
        with local(options, ["input_dir"], ["output_dir"]):
            convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"{command}: error: {problem}")


def main(argv: Sequence[str] | None = None) -> None:
    run("reshard.py", argv, parser(None, None, __doc__))


if __name__ == "__main__":
    run_command(main)
