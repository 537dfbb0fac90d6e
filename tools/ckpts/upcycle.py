"""Turn a dense checkpoint into one with experts, each a copy of its feed-forward. One layer is in memory at a
time.

    python tools/ckpts/upcycle.py --input_dir checkpoints/dense --output_dir upcycled --experts moe.yml
    python tools/ckpts/upcycle.py --input_dir checkpoints/dense --output_dir upcycled \\
        --set moe_num_experts=8 moe_top_k=2 moe_router_type=topk norm_topk_prob=true moe_layer_freq=[0,1]

A run with these keys, `load: upcycled` and `finetune: true` begins with the dense model's loss (fp32: to
rounding), at iteration 0 and with a new optimizer. Settings that would begin with another loss are refused.
Routers are initialised as in a fresh model. The checkpoint appears in the output folder only when it is
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
    add_source_flags(parser, "folder for global_step0")
    parser.add_argument(
        "--experts", metavar="FILE", nargs="+", action="extend", default=[],
        help="YAML with the keys of experts (moe_*, norm_topk_prob); a run takes the same file",
    )  # fmt: skip
    parser.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="such keys, over those of the files"
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel size of the files; any run can read them (1)"
    )
    parser.add_argument("--seed", type=int, help="of the routers (that of the dense model's configuration)")
    return parser.parse_args(argv)


def convert(options: argparse.Namespace) -> None:
    """Turns a dense checkpoint into a mixture of experts, as the options say.

    Raises CheckpointError, ConfigError."""
    from megatron.checkpointing import CheckpointError
    from megatron.checkpointing.upcycling import read_expert_keys, upcycle, upcycled_args

    if options.tp < 1:
        raise CheckpointError("--tp must be at least 1")
    if (options.input_dir / "config.json").is_file():
        raise CheckpointError(
            f"{options.input_dir}: is a HuggingFace model; convert it first, then upcycle DENSE: "
            f"tools/ckpts/convert_hf_to_neox.py --hf-model {options.input_dir} --output-dir DENSE"
        )
    keys = read_expert_keys(options.experts, options.set)
    source, dense, _ = source_of(options)
    args = upcycled_args(dense, keys, options.tp, options.seed)
    path = upcycle(source, options.output_dir, dense, args, progress)
    chosen = [block + 2 for block in range(args.num_layers) if args.has_experts(block)]
    blocks = f"{len(chosen)} of {args.num_layers} blocks (layers {', '.join(map(str, chosen))})"
    print(f"{path}: {blocks} have {args.moe_num_experts} experts, copies of their feed-forward in {source}")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, ["input_dir"], ["output_dir"]):
            convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"{NAME}: error: {problem}")


if __name__ == "__main__":
    run_command(main)
