"""Converts a LLaMA or Mistral model, a checkpoint or a HuggingFace folder, to Meta's format.

The format is a folder with params.json and consolidated.NN.pth.

    python tools/ckpts/convert_neox_to_raw_llama.py --input_dir checkpoints/run/global_step1000 --output_dir raw \\
        --num_output_shards 2

A checkpoint is first converted to HuggingFace's format, which checks the logits, in a temporary folder beside
the output.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import add_source_flags, local, progress, source_of  # noqa: E402

NAME = "convert_neox_to_raw_llama.py"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_source_flags(parser, "the folder to write")
    parser.add_argument(
        "--num_output_shards",
        "--num-output-shards",
        type=int,
        default=1,
        help="consolidated.NN.pth",
    )
    return parser.parse_args(argv)


def convert(options: argparse.Namespace) -> None:
    """Converts a checkpoint or HuggingFace model to Meta's format, as the command-line options say.

    Raises CheckpointError, ConfigError."""
    from megatron.checkpointing.huggingface import HFFolder, export_hf, is_hf
    from megatron.checkpointing.huggingface.raw_llama import write_raw

    if is_hf(options.input_dir):
        write_raw(HFFolder(options.input_dir), options.output_dir, options.num_output_shards)
        return
    source, args, _ = source_of(options)
    options.output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp_", dir=options.output_dir.parent) as spare:
        hf = Path(spare) / "hf"
        report = export_hf(source, args, hf, progress=progress)
        write_raw(HFFolder(hf, str(source)), options.output_dir, options.num_output_shards)
    print(f"{options.output_dir}: {report}")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, ["input_dir"], ["output_dir"]):
            convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"{NAME}: error: {problem}")
    print(f"{options.output_dir}: wrote {options.num_output_shards} files of weights with Meta's names")


if __name__ == "__main__":
    run_command(main)
