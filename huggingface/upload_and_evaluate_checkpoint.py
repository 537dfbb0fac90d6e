"""Publishes checkpoints of an experiment on the HuggingFace Hub, the newest first; with --eval evaluates
them.

Each is published in HuggingFace's and in GPT-NeoX's format, unless flags choose one of them.

    python huggingface/upload_and_evaluate_checkpoint.py --experiment_name my-run --hf_org my-org
    python huggingface/upload_and_evaluate_checkpoint.py --experiment_name my-run --repository my-org/my-model \\
        --neox_checkpoint global_step1000 --skip-neox-upload
    HF_ENDPOINT=https://hub.example.org python huggingface/upload_and_evaluate_checkpoint.py ...

The token is HF_TOKEN, or that of `hf auth login`. After an interruption or a failure, run the same command
again to continue; nothing is sent twice. huggingface/batch_submit_checkpoints.sh submits one Slurm job per
checkpoint."""  # noqa: W505 (lines to copy)

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.operations.hub.flags import (  # noqa: E402
    add_delay_flag,
    add_evaluation_flags,
    add_format_flags,
    add_patience_flags,
    add_place_flags,
    add_tokenizer_flags,
    delays_of,
    formats_of,
    patience_of,
    tasks_of,
    tokenizer_of,
)
from megatron.process import (  # noqa: E402
    begin_process,
    end_process,
    run_command,  # noqa: E402
)
from megatron.process.command_parser import CommandParser  # noqa: E402

_NAME = "upload_and_evaluate_checkpoint.py"
_WRITTEN_WITHIN_S = 1800.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--experiment_name",
        "--experiment-name",
        required=True,
        help="a folder below the site's NEOX_CHECKPOINT_DIR, or a path",
    )
    parser.add_argument(
        "--neox_checkpoint",
        "--neox-checkpoint",
        nargs="+",
        metavar="global_step<N>",
        help="checkpoints to publish (default: all, newest first)",
    )
    parser.add_argument("--hf_org", "--hf-org", help="organisation on the Hub (default: the site's NEOX_HUB_ORG)")
    parser.add_argument(
        "--repository",
        metavar="ORG/NAME",
        help="repository on the Hub (default: derived from the experiment, docs/hub.md)",
    )
    add_place_flags(parser)
    parser.add_argument(
        "--local_hf_checkpoints_path", "--local-hf-checkpoints-path", type=Path, metavar="DIR",
        help="folder for converted models until they are sent (default: <experiment>/hub)",
    )  # fmt: skip
    parser.add_argument("--keep-converted", action="store_true", help="do not delete converted models after the upload")
    add_format_flags(parser)
    add_tokenizer_flags(parser)
    add_delay_flag(parser, "the first upload")
    add_evaluation_flags(parser)
    add_patience_flags(parser)
    parser.add_argument(
        "--background",
        action="store_true",
        help="run with low priority, and wait for a checkpoint that a training run is still writing",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.background:
        os.nice(19)
    try:
        return run(options)
    except (UserError, OSError) as problem:
        print(f"{_NAME}: error: {problem}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    from megatron.operations.hub.checkpoints import last_step
    from megatron.operations.hub.submission import experiment_of_flags
    from megatron.operations.hub.upload import Upload, publish_checkpoint

    chosen = experiment_of_flags(options, may_be_empty=options.background)
    patience, tasks = patience_of(options), tasks_of(options, chosen.site, chosen.newest)
    (delay,) = delays_of(options, 1, random.Random())
    if tasks:
        _say(f"tasks of the evaluation: {' '.join(tasks)}")
    if delay:
        _say(f"waiting {delay} s before the first upload (--upload-delay)")
        time.sleep(delay)
    for step in chosen.steps:
        last = last_step(chosen.save / f"global_step{step}")
        if last is None:
            _say(f"global_step{step}: not published as main too, because train_iters of its run is unknown")
        upload = Upload(
            save=chosen.save, step=step, repository=chosen.repository, is_last=step == last,
            formats=formats_of(options), scratch=options.local_hf_checkpoints_path,
            keep_converted=options.keep_converted, patience=patience, tasks=tasks,
            include=tuple(options.task_include_path or ()), eval_limit=options.eval_limit,
            tokenizer=tokenizer_of(options), wandb_project=options.wandb_project, wandb_entity=options.wandb_entity,
            force_eval=options.force_eval,
        )  # fmt: skip
        publish_checkpoint(upload, _say, _WRITTEN_WITHIN_S if options.background else 0.0)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    begin_process(_NAME, "run the same command again to continue")
    run_command(lambda: end_process(main()))
