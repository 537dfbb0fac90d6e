#!/usr/bin/env python
"""Scores texts, conversations or pairs of answers with a reward model.

    python tools/score.py --model checkpoints/reward --input pairs.jsonl --output scores.jsonl
    torchrun --nproc-per-node 2 tools/score.py --model checkpoints/reward --tp 2 --input chats.jsonl --output s.jsonl

MODEL is a HuggingFace folder, a name on the Hub, a folder of checkpoints (the one that `latest` names, or
--iteration) or one global_stepN. Rows are {"chosen", "rejected"} (with a `prompt`, or as full conversations),
{"messages"}, {"prompt", "completion"} or {"text"}. They are tokenised as by
tools/datasets/preprocess_data_with_chat_template.py, including the end token that it adds. The output has one
line per row: {"score", "tokens"}, or for pairs {"chosen", "rejected", "margin", "tokens"}. For pairs,
accuracy, margin, loss and calibration are printed, and the calibration is plotted beside the output.
"""  # noqa: W505 (lines to copy)

import argparse
import logging
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

if TYPE_CHECKING:
    from megatron.generation.scoring.rewards import PairReport


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="MODEL", help="the reward model")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="PATH[=WEIGHT]",
        help="LoRA adapters to add to MODEL, with a factor (default: 1); repeat to add several",
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="checkpoint to use if MODEL is a folder of them (default: latest)"
    )
    parser.add_argument(
        "--input", required=True, help="rows to score: JSONL, Parquet or another input of the preprocess commands"
    )
    parser.add_argument("--split", help="split of a dataset that has several, such as test or train[:10%%]")
    parser.add_argument("--subset", help="configuration of a HuggingFace dataset that has several")
    parser.add_argument("--output", required=True, type=Path, help="JSONL file, written when all rows are scored")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot of the calibration of pairs (default: OUTPUT with .png)"
    )
    parser.add_argument(
        "--jsonl-keys",
        nargs="+",
        metavar="KEY",
        help="keys or columns to score (default: chosen rejected, messages, completion or text, whichever exists)",
    )
    parser.add_argument("--tokenizer-path", help="folder or Hub name of the tokenizer (default: the model's own)")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja chat template, instead of the tokenizer's own")
    parser.add_argument(
        "--date", default=date.today().isoformat(), help="date that chat templates use as today (default: current date)"
    )
    parser.add_argument(
        "--overlong", choices=("refuse", "truncate_left", "drop"), default="refuse",
        help="for rows longer than the model's positions: stop with an error (default), remove their beginning, or "
        "write null as score",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=("fp32", "bfloat16", "fp16"), help="dtype of the model (default: as it is stored)"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="rows of a forward pass (default: as many as fit into memory)"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    return parser.parse_args(argv)


def plot(report: "PairReport", path: Path) -> None:
    """Plots the calibration of scored pairs to the file `path`.

    x is the predicted probability that the answer with the higher score is the chosen one; y is the share of
    pairs in which it is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    sizes = [400 * bin.count / report.pairs for bin in report.bins]
    predicted, observed = ([getattr(bin, name) for bin in report.bins] for name in ("predicted", "observed"))
    axes.plot(predicted, observed, color="tab:blue", linewidth=1)
    axes.scatter(predicted, observed, s=sizes, color="tab:blue", alpha=0.6, label="pairs, by size of the point")
    axes.set_xlabel("predicted probability that the answer with the higher score is better")
    axes.set_ylabel("share of pairs in which it is the chosen one")
    axes.set_title(str(report), fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(options: argparse.Namespace) -> None:
    """Scores the rows of --input with --model, on this rank; rank 0 writes the output and plots pairs."""
    from torch.distributed import destroy_process_group

    from megatron.generation.scoring.reward_file import ScoreJob, load_reward_model, reward_model_args, score_file
    from megatron.launch import enter

    logger = logging.getLogger("megatron")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    args = reward_model_args(
        options.model,
        iteration=options.iteration,
        precision=options.precision,
        tensor=options.tp,
        pipe=options.pp,
        adapter=options.adapter,
    )
    model = load_reward_model(args, enter(args), logger)
    job = ScoreJob(
        options.input, options.output, options.split, options.subset, tuple(options.jsonl_keys or ()),
        options.tokenizer_path, options.chat_template, options.date, options.overlong, options.batch_size,
    )  # fmt: skip
    report = score_file(model, job, logger)
    if model.groups.world_rank == 0 and report is not None:
        picture = options.plot or options.output.with_suffix(".png")
        plot(report, picture)
        print(f"{report}; plot: {picture}")
    destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of tools/score.py on this rank. Returns 0, or 1 after an error."""
    options = parse(argv)
    from megatron.neox_arguments import UserError

    try:
        run(options)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("score.py"))
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
