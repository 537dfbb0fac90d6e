"""Converts a checkpoint of a Mamba or Mamba 2 model to the format of the package mamba_ssm.

The format is a folder with config.json and pytorch_model.bin.

    python tools/ckpts/convert_neox_to_mamba_ssm.py --input_dir checkpoints/run/global_step1000 --output_dir mamba \\
        --config_file run.yml --precision bf16

`MambaLMHeadModel.from_pretrained("mamba")` loads the folder. For transformers, use convert_neox_to_hf.py with
the families `mamba` and `mamba2`.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import PRECISIONS, add_source_flags, local, progress, source_of  # noqa: E402

NAME = "convert_neox_to_mamba_ssm.py"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_source_flags(parser, "the folder to write")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="dtype of the written weights, except A_log and D, which are fp32; auto: the checkpoint's",
    )
    parser.add_argument(
        "--no_save_tokenizer", "--no-save-tokenizer", action="store_true", help="write no tokenizer into the folder"
    )
    return parser.parse_args(argv)


def convert(options: argparse.Namespace) -> None:
    """Converts a checkpoint to mamba_ssm's format, as the command-line options say.

    Raises CheckpointError, ConfigError."""
    import torch

    from megatron.checkpointing import describe_layout
    from megatron.checkpointing.huggingface.mamba_ssm import export_mamba_ssm

    dtype = PRECISIONS[options.precision]
    source, args, _ = source_of(options)
    print(f"{source}: {describe_layout(source, args)}", flush=True)
    export_mamba_ssm(
        source, args, options.output_dir, dtype=getattr(torch, dtype) if dtype else None,
        tokenizer=not options.no_save_tokenizer, progress=progress,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, ["input_dir"], ["output_dir"]):
            convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"{NAME}: error: {problem}")
    print(f"{options.output_dir}: wrote config.json and pytorch_model.bin with mamba_ssm's names of weights")


if __name__ == "__main__":
    run_command(main)
