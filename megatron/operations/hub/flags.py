"""The flags that submitting and uploading have in common, and what they say."""

import argparse
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from megatron.neox_arguments import UserError
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.retrying import Patience
from megatron.operations.hub.upload import Formats

# By --eval where flags, site and run name no tasks: those of lm-eval that the fork evaluates.
USUAL_TASKS = ("mmlu", "piqa", "lambada", "hellaswag", "wmdp_bio")
_LONGEST_RANDOM_S = 12 * 3600
_STAGGER_S = 30  # between jobs that wait a fixed time, as in the fork
_CONVERTER = "convert_neox_to_hf.py"


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """Add --neox_checkpoints_path, by each of its names."""
    parser.add_argument(
        "--neox_checkpoints_path", "--neox-checkpoints-path", "--checkpoints-base-dir", metavar="DIR",
        help="folder of experiments; unset: the site's NEOX_CHECKPOINT_DIR, else checkpoints",
    )  # fmt: skip


def add_format_flags(parser: argparse.ArgumentParser) -> None:
    """Add --upload-neox-only, --skip-neox-upload, and the fork's flags that say what is so without them."""
    parser.add_argument("--upload-neox-only", action="store_true", help="only in GPT-NeoX's format, nothing converted")
    parser.add_argument("--skip-neox-upload", action="store_true", help="only in HuggingFace's format")
    parser.add_argument(
        "--upload-neox", "--upload-neox-checkpoint", "--upload-all-neox-checkpoints", action="store_true",
        help="every checkpoint in both formats, as without it",
    )  # fmt: skip
    parser.add_argument(
        "--skip-if-exists", "--skip-neox-if-exists", action="store_true",
        help="always so: what the Hub has is not sent again, and is evaluated where its scores are not known",
    )  # fmt: skip


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add --tokenizer_hf_path, --local_tokenizer_path and --conversion_script_path."""
    parser.add_argument(
        "--tokenizer_hf_path", "--tokenizer-hf-path", metavar="NAME",
        help="folder, tokenizer.json or Hub name, published in the place of the checkpoint's tokenizer",
    )  # fmt: skip
    parser.add_argument(
        "--local_tokenizer_path", "--local-tokenizer-path", metavar="FILE", help="the same; the one above comes first"
    )
    parser.add_argument(
        "--conversion_script_path",
        "--conversion-script-path",
        type=_converter,
        metavar="FILE",
        help=f"{_CONVERTER}, wherever: the conversion is our own",
    )


def add_delay_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --upload-delay; what: waits, in words."""
    parser.add_argument(
        "--upload-delay",
        default="0",
        metavar="SECONDS|random",
        help=f"seconds before {what}; random: up to 12 hours (0)",
    )


def add_evaluation_flags(parser: argparse.ArgumentParser) -> None:
    """Add --eval, --skip-eval, what they evaluate, and where scores are logged."""
    evaluation = parser.add_mutually_exclusive_group()
    evaluation.add_argument(
        "--eval", action="store_true", help="evaluate after the upload (default: if tasks are named)"
    )
    evaluation.add_argument("--skip-eval", action="store_true", help="do not evaluate")
    parser.add_argument(
        "--force-eval-if-exists", dest="force_eval", action="store_true",
        help="evaluate, and log, also where the scores of these tasks are known",
    )  # fmt: skip
    parser.add_argument(
        "--eval_tasks", "--eval-tasks", nargs="+", metavar="TASK",
        help="commas may stand between; unset: the site's NEOX_EVAL_TASKS; with --eval the run's eval_tasks too, else "
        f"{', '.join(USUAL_TASKS)}",
    )  # fmt: skip
    parser.add_argument("--task_include_path", "--task-include-path", nargs="+", metavar="DIR", help="of own tasks")
    parser.add_argument("--eval_limit", "--eval-limit", type=float, metavar="N", help="documents of each task")
    parser.add_argument("--wandb_project", "--wandb-project", metavar="NAME", help="scores go to this W&B project too")
    parser.add_argument("--wandb_entity", "--wandb-entity", metavar="NAME", help="whose project it is")


def add_patience_flags(parser: argparse.ArgumentParser) -> None:
    """Add --max-retries, --retry-min-wait and --retry-max-wait."""
    usual = Patience()
    parser.add_argument(
        "--max-retries", type=int, default=usual.max_retries, metavar="N",
        help=f"of 429, 5xx and broken connections ({usual.max_retries})",
    )  # fmt: skip
    for name, value in (("min", usual.min_wait_s), ("max", usual.max_wait_s)):
        words = "waits grow from here" if name == "min" else "to here, also where the Hub says longer"
        parser.add_argument(
            f"--retry-{name}-wait", type=float, default=value, metavar="SECONDS", help=f"{words} ({value:.0f})"
        )


def formats_of(options: argparse.Namespace) -> Formats:
    """The formats that are uploaded. Raises HubError for flags that exclude each other."""
    if options.skip_neox_upload and (options.upload_neox_only or options.upload_neox):
        other = "--upload-neox-only" if options.upload_neox_only else "--upload-neox"
        raise HubError(f"--skip-neox-upload and {other} exclude each other; remove one")
    return "neox" if options.upload_neox_only else "hf" if options.skip_neox_upload else "both"


def tokenizer_of(options: argparse.Namespace) -> str | None:
    """What takes the place of the checkpoint's tokenizer; a path is absolute, since jobs begin elsewhere."""
    name = options.tokenizer_hf_path or options.local_tokenizer_path
    return os.path.abspath(name) if name and os.path.exists(name) else name


def delays_of(options: argparse.Namespace, count: int, draw: random.Random) -> list[int]:
    """Seconds until each of so many uploads may begin. draw: of random ones. Raises HubError."""
    delay = options.upload_delay
    if delay == "random":
        return [draw.randint(0, _LONGEST_RANDOM_S) for _ in range(count)]
    if not delay.isdecimal():
        raise HubError(f"--upload-delay {delay}: give whole seconds, or random (up to 12 hours)")
    return [int(delay) + _STAGGER_S * number if int(delay) else 0 for number in range(count)]


def patience_of(options: argparse.Namespace) -> Patience:
    """How often what failed is tried again. Raises HubError for numbers that make no sense."""
    if options.max_retries < 0:
        raise HubError(f"--max-retries {options.max_retries}: give 0 or more")
    if not 0 <= options.retry_min_wait <= options.retry_max_wait:
        raise HubError(
            f"--retry-min-wait {options.retry_min_wait:g} --retry-max-wait {options.retry_max_wait:g}: give "
            "seconds, the first not above the second"
        )
    return Patience(options.max_retries, options.retry_min_wait, options.retry_max_wait)


def tasks_of(options: argparse.Namespace, site: Mapping[str, str], checkpoint: Path | None) -> tuple[str, ...]:
    """The tasks of the evaluation; () where there is none. checkpoint: whose run's tasks --eval takes where
    none are named. Raises HubError where nothing is converted that could be evaluated, or scores are to be
    logged and nothing is evaluated."""
    named = _names(options.eval_tasks or [site.get("NEOX_EVAL_TASKS", "")])
    if options.upload_neox_only and (options.eval or options.eval_tasks):
        raise HubError("--upload-neox-only: nothing is converted that could be evaluated; remove it, or --eval")
    if options.eval and not named:
        named = _tasks_of_run(checkpoint) or USUAL_TASKS
    tasks = () if options.skip_eval or options.upload_neox_only else named
    if not tasks and (options.wandb_project or options.wandb_entity):
        flag = "--wandb_project" if options.wandb_project else "--wandb_entity"
        raise HubError(f"{flag}: there are no scores to log; add --eval, or remove it")
    return tasks


def _names(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(" ".join(words).replace(",", " ").split())


def _tasks_of_run(checkpoint: Path | None) -> tuple[str, ...]:
    from megatron.checkpointing.saved_config import checkpoint_args

    try:
        return tuple(checkpoint_args(checkpoint).eval_tasks or ()) if checkpoint is not None else ()
    except UserError:  # its configuration is not known
        return ()


def _converter(text: str) -> str:
    if PurePath(text).name != _CONVERTER:
        raise argparse.ArgumentTypeError(f"{text}: the conversion is {_CONVERTER}; no other takes its place")
    return text
