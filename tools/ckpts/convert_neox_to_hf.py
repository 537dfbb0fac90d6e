"""Converts a checkpoint, ours or GPT-NeoX's of any layout and version, to a HuggingFace model folder.

    python tools/ckpts/convert_neox_to_hf.py --input_dir checkpoints/run/global_step1000 --config_file run.yml \\
        --output_dir hf/run --precision bf16

Plain transformers loads the folder. Before it appears, its logits on a fixed batch are compared with those of
this project's model; if they differ too much, the command fails. After an interruption, run the same command
again.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import (  # noqa: E402
    PRECISIONS,
    add_dry_run_flag,
    add_source_flags,
    local,
    print_plan,
    progress_then_check,
    source_of,
)

if TYPE_CHECKING:
    from megatron.checkpointing.huggingface import LogitComparison


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_source_flags(parser, "the folder to write")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="auto", help="dtype of the written weights; auto: the checkpoint's"
    )
    parser.add_argument("--ema", action="store_true", help="write the averages of the weights, of a run with ema_decay")
    parser.add_argument(
        "--no_save_tokenizer", "--no-save-tokenizer", action="store_true", help="write no tokenizer into the folder"
    )
    parser.add_argument(
        "--vocab-is-hf-tokenizer",
        action="store_true",
        help="read the tokenizer from vocab_file as from a HuggingFace folder or Hub name",
    )
    parser.add_argument(
        "--pad-token-id", type=int, default=-1, help="id of the padding token; -1: the tokenizer's own (default)"
    )
    parser.add_argument(
        "--architecture",
        default="auto",
        help="HuggingFace model_type to write (see tools/ckpts/families.py), or neox; auto: that of the imported "
        "model, else the first that fits",
    )
    add_dry_run_flag(parser)
    return parser.parse_args(argv)


def convert(options: argparse.Namespace) -> "LogitComparison | None":
    """Converts a checkpoint to a HuggingFace model folder, as the command-line options say.

    Returns the comparison of the two models' logits; None for a dry run. Raises CheckpointError, ConfigError.
    """
    import torch

    from megatron.checkpointing import describe_layout
    from megatron.checkpointing.huggingface import export_hf, export_plan, unwritten_blocks

    family = {"auto": None, "neox": "gpt_neox"}.get(options.architecture, options.architecture)
    dtype = PRECISIONS[options.precision]
    source, args, _ = source_of(options)
    print(f"{source}: {describe_layout(source, args)}", flush=True)
    export_options: dict[str, Any] = {
        "family": family, "averaged": options.ema, "dtype": getattr(torch, dtype) if dtype else None,
        "tokenizer": not options.no_save_tokenizer, "vocab_is_hf": options.vocab_is_hf_tokenizer,
        "pad_token_id": options.pad_token_id if options.pad_token_id >= 0 else None,
    }  # fmt: skip
    if options.dry_run:
        print_plan(
            {f"{options.output_dir}/{name}": size for name, size in export_plan(source, args, **export_options).items()}
        )
        return None
    report = export_hf(source, args, options.output_dir, progress=progress_then_check, **export_options)
    if (note := unwritten_blocks(options.output_dir, args)) is not None:
        print(note)
    return report


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, ["input_dir"], [] if options.dry_run else ["output_dir"]):
            report = convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"convert_neox_to_hf.py: error: {problem}")
    if report is not None:
        print(f"{options.output_dir}: {report}")


if __name__ == "__main__":
    run_command(main)
