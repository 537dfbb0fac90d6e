"""Turns a dense checkpoint into a mixture of experts, in which each expert is a copy of the dense MLP.

    python tools/ckpts/upcycle.py --input_dir checkpoints/dense --output_dir upcycled --experts moe.yml
    python tools/ckpts/upcycle.py --input_dir checkpoints/dense --output_dir upcycled \\
        --set moe_num_experts=8 moe_top_k=2 moe_router_type=topk norm_topk_prob=true moe_layer_freq=[0,1]

A run with the same keys, `load: upcycled` and `finetune: true` starts with the dense model's loss (in fp32 up
to rounding), at iteration 0, with a new optimizer. Keys with which the loss would differ are refused. Routers
are initialised as in a new model. One layer is in memory at a time. The checkpoint appears only when it is
complete. After an interruption, run the same command again.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import add_source_flags, local, progress, source_of  # noqa: E402

NAME = "upcycle.py"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_source_flags(parser, "folder in which global_step0 is written")
    parser.add_argument(
        "--experts", metavar="FILE", nargs="+", action="extend", default=[],
        help="YAML files with keys of experts (moe_*, norm_topk_prob); give the same files to the run",
    )  # fmt: skip
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="keys of experts, with priority over the files",
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor-parallel size of the files; runs of any size can read them (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the routers' weights (default: the seed in the dense model's configuration)"
    )
    return parser.parse_args(argv)


def convert(options: argparse.Namespace) -> None:
    """Turns a dense checkpoint into a mixture of experts, as the command-line options say.

    Raises CheckpointError, ConfigError."""
    from megatron.checkpointing import CheckpointError
    from megatron.checkpointing.upcycling import read_expert_keys, upcycle, upcycled_args

    if options.tp < 1:
        raise CheckpointError("--tp, the tensor-parallel size, must be at least 1")
    if (options.input_dir / "config.json").is_file():
        raise CheckpointError(
            f"{options.input_dir}: is a HuggingFace model; first convert it to a folder DENSE, then upcycle DENSE: "
            f"tools/ckpts/convert_hf_to_neox.py --hf-model {options.input_dir} --output-dir DENSE"
        )
    keys = read_expert_keys(options.experts, options.set)
    source, dense, _ = source_of(options)
    args = upcycled_args(dense, keys, options.tp, options.seed)
    path = upcycle(source, options.output_dir, dense, args, progress)
    chosen = [block + 2 for block in range(args.num_layers) if args.has_experts(block)]
    blocks = f"{len(chosen)} of {args.num_layers} blocks (layers {', '.join(map(str, chosen))})"
    print(f"{path}: {blocks} have {args.moe_num_experts} experts, each a copy of the block's MLP in {source}")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, ["input_dir"], ["output_dir"]):
            convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"{NAME}: error: {problem}")


if __name__ == "__main__":
    run_command(main)
