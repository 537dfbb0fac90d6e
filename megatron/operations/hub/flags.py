"""Defines command-line flags shared by the commands that submit and upload checkpoints, and reads their
values."""

import argparse
import os
import random
from collections.abc import Mapping
from pathlib import Path, PurePath

from megatron.neox_arguments import UserError
from megatron.neox_arguments.values.integers import parse_integer
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.retrying import Patience
from megatron.operations.hub.upload import Formats

# lm-eval tasks of --eval where neither the flags, the site nor the run name tasks; from the GPT-NeoX fork.
USUAL_TASKS = ("mmlu", "piqa", "lambada", "hellaswag", "wmdp_bio")
_LONGEST_RANDOM_S = 12 * 3600
_STAGGER_S = 30  # between jobs that wait a fixed time, as in the fork
_CONVERTER = "convert_neox_to_hf.py"


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --neox_checkpoints_path, also spelled --neox-checkpoints-path and --checkpoints-base-dir."""
    parser.add_argument(
        "--neox_checkpoints_path", "--neox-checkpoints-path", "--checkpoints-base-dir", metavar="DIR",
        help="folder that holds the experiments (default: the site's NEOX_CHECKPOINT_DIR, else ./checkpoints)",
    )  # fmt: skip


def add_format_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --upload-neox-only and --skip-neox-upload, and flags of the GPT-NeoX fork that ask for the
    default."""
    parser.add_argument(
        "--upload-neox-only", action="store_true", help="upload only GPT-NeoX's format; convert nothing"
    )
    parser.add_argument("--skip-neox-upload", action="store_true", help="upload only HuggingFace's format")
    parser.add_argument(
        "--upload-neox", "--upload-neox-checkpoint", "--upload-all-neox-checkpoints", action="store_true",
        help="upload both formats; this is the default, so the flag changes nothing",
    )  # fmt: skip
    parser.add_argument(
        "--skip-if-exists", "--skip-neox-if-exists", action="store_true",
        help="do not send files again that the Hub has; this is the default, so the flag changes nothing",
    )  # fmt: skip


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --tokenizer_hf_path, --local_tokenizer_path and --conversion_script_path."""
    parser.add_argument(
        "--tokenizer_hf_path", "--tokenizer-hf-path", metavar="NAME",
        help="publish this tokenizer instead of the checkpoint's: a folder, a tokenizer.json or a Hub name",
    )  # fmt: skip
    parser.add_argument(
        "--local_tokenizer_path", "--local-tokenizer-path", metavar="FILE", help="used if --tokenizer_hf_path is unset"
    )
    parser.add_argument(
        "--conversion_script_path", "--conversion-script-path", type=_converter, metavar="FILE",
        help=f"accepted for old command lines if the file is called {_CONVERTER}; the file is not run",
    )  # fmt: skip


def add_delay_flag(parser: argparse.ArgumentParser, waits: str) -> None:
    """Adds --upload-delay. waits: the end of the help text "seconds before ...", such as "the upload
    starts"."""
    parser.add_argument(
        "--upload-delay", default="0", metavar="SECONDS|random",
        help=f"seconds before {waits}; random: a random time up to 12 hours (default: 0)",
    )  # fmt: skip


def add_evaluation_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --eval, --skip-eval and --force-eval-if-exists, and flags for the tasks and for W&B logging of
    scores."""
    evaluation = parser.add_mutually_exclusive_group()
    evaluation.add_argument(
        "--eval", action="store_true", help="evaluate after the upload (default: if tasks are named)"
    )
    evaluation.add_argument("--skip-eval", action="store_true", help="do not evaluate")
    parser.add_argument(
        "--force-eval-if-exists", dest="force_eval", action="store_true",
        help="evaluate, and log scores, even if the scores of these tasks are already known",
    )  # fmt: skip
    parser.add_argument(
        "--eval_tasks", "--eval-tasks", nargs="+", metavar="TASK",
        help="tasks, separated by spaces or commas (default: the site's NEOX_EVAL_TASKS; if that is empty, --eval "
        f"takes the run's eval_tasks, else {', '.join(USUAL_TASKS)})",
    )  # fmt: skip
    parser.add_argument(
        "--task_include_path",
        "--task-include-path",
        nargs="+",
        metavar="DIR",
        help="folders of your lm-eval tasks",
    )
    parser.add_argument(
        "--eval_limit", "--eval-limit", type=float, metavar="N", help="evaluate only N documents of each task"
    )
    parser.add_argument("--wandb_project", "--wandb-project", metavar="NAME", help="log scores to this W&B project too")
    parser.add_argument(
        "--wandb_entity", "--wandb-entity", metavar="NAME", help="W&B user or team that owns the project"
    )


def add_patience_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --max-retries, --retry-min-wait and --retry-max-wait."""
    usual = Patience()
    parser.add_argument(
        "--max-retries", type=int, default=usual.max_retries, metavar="N",
        help=f"retries of a request after HTTP 429, 5xx or a broken connection (default: {usual.max_retries})",
    )  # fmt: skip
    for name, value in (("min", usual.min_wait_s), ("max", usual.max_wait_s)):
        words = "first wait before a retry; doubles each time" if name == "min" else "longest wait before a retry"
        parser.add_argument(
            f"--retry-{name}-wait", type=float, default=value, metavar="SECONDS", help=f"{words} (default: {value:.0f})"
        )


def formats_of(options: argparse.Namespace) -> Formats:
    """Returns the formats to upload: "hf", "neox" or "both". Raises HubError for flags that exclude each
    other."""
    if options.skip_neox_upload and (options.upload_neox_only or options.upload_neox):
        conflicting = "--upload-neox-only" if options.upload_neox_only else "--upload-neox"
        raise HubError(f"--skip-neox-upload and {conflicting} exclude each other; remove one")
    return "neox" if options.upload_neox_only else "hf" if options.skip_neox_upload else "both"


def tokenizer_of(options: argparse.Namespace) -> str | None:
    """Returns the tokenizer to publish instead of the checkpoint's, a path or Hub name; None to keep it.

    A path is made absolute, because jobs start in another folder."""
    name = options.tokenizer_hf_path or options.local_tokenizer_path
    return os.path.abspath(name) if name and os.path.exists(name) else name


def delays_of(options: argparse.Namespace, count: int, draw: random.Random) -> list[int]:
    """Returns the seconds by which each of `count` uploads is delayed, from --upload-delay.

    draw: generator of random delays. Raises HubError for text that is neither whole seconds nor "random".
    """
    delay = options.upload_delay
    if delay == "random":
        return [draw.randint(0, _LONGEST_RANDOM_S) for _ in range(count)]
    seconds = parse_integer(delay)
    if seconds is None:
        raise HubError(f"--upload-delay {delay}: give whole seconds, or the word random (up to 12 hours)")
    return [seconds + _STAGGER_S * number if seconds else 0 for number in range(count)]


def patience_of(options: argparse.Namespace) -> Patience:
    """Returns the retry policy from --max-retries, --retry-min-wait and --retry-max-wait.

    Raises HubError for a negative value, or a minimum above the maximum.
    """
    if options.max_retries < 0:
        raise HubError(f"--max-retries {options.max_retries}: must not be negative; give 0 or more")
    if not 0 <= options.retry_min_wait <= options.retry_max_wait:
        raise HubError(
            f"--retry-min-wait {options.retry_min_wait:g} --retry-max-wait {options.retry_max_wait:g}: give "
            "seconds, with 0 <= minimum <= maximum"
        )
    return Patience(options.max_retries, options.retry_min_wait, options.retry_max_wait)


def tasks_of(options: argparse.Namespace, site: Mapping[str, str], checkpoint: Path | None) -> tuple[str, ...]:
    """Returns the lm-eval tasks to evaluate, from the flags or the site's NEOX_EVAL_TASKS; () for no
    evaluation.

    checkpoint: --eval without tasks takes `eval_tasks` of the run that saved it.

    Raises HubError for an evaluation with --upload-neox-only, and for a W&B flag without an evaluation.
    """
    names = " ".join(options.eval_tasks or [site.get("NEOX_EVAL_TASKS", "")])
    tasks_requested = tuple(names.replace(",", " ").split())
    if options.upload_neox_only and (options.eval or options.eval_tasks):
        raise HubError(
            "--upload-neox-only converts no model, but --eval and --eval_tasks evaluate the converted model; remove "
            "--upload-neox-only, or --eval and --eval_tasks"
        )
    if options.eval and not tasks_requested:
        tasks_requested = _tasks_of_run(checkpoint) or USUAL_TASKS
    tasks = () if options.skip_eval or options.upload_neox_only else tasks_requested
    if not tasks and (options.wandb_project or options.wandb_entity):
        flag = "--wandb_project" if options.wandb_project else "--wandb_entity"
        raise HubError(f"{flag}: without an evaluation there are no scores to log; add --eval, or remove {flag}")
    return tasks


def _tasks_of_run(checkpoint: Path | None) -> tuple[str, ...]:
    from megatron.checkpointing.saved_config import checkpoint_args

    try:
        return tuple(checkpoint_args(checkpoint).eval_tasks or ()) if checkpoint is not None else ()
    except UserError:  # the checkpoint's configuration cannot be read
        return ()


def _converter(text: str) -> str:
    if PurePath(text).name != _CONVERTER:
        raise argparse.ArgumentTypeError(f"{text}: no other converter than {_CONVERTER} is supported; remove the flag")
    return text
