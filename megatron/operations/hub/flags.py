"""The flags that submitting and uploading have in common, and what they say."""

import argparse
from collections.abc import Mapping

from megatron.operations.hub.errors import HubError
from megatron.operations.hub.retrying import Patience
from megatron.operations.hub.upload import Formats


def add_format_flags(parser: argparse.ArgumentParser) -> None:
    """Add --upload-neox-only and --skip-neox-upload."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--upload-neox-only", action="store_true", help="only in GPT-NeoX's format, nothing converted")
    formats.add_argument("--skip-neox-upload", action="store_true", help="only in HuggingFace's format")


def add_evaluation_flags(parser: argparse.ArgumentParser) -> None:
    """Add --eval, --skip-eval and what they evaluate."""
    evaluation = parser.add_mutually_exclusive_group()
    evaluation.add_argument(
        "--eval", action="store_true", help="evaluate after the upload (default: if tasks are named)"
    )
    evaluation.add_argument("--skip-eval", action="store_true", help="do not evaluate")
    parser.add_argument(
        "--eval_tasks", "--eval-tasks", nargs="+", metavar="TASK", help="unset: those of the site's NEOX_EVAL_TASKS"
    )
    parser.add_argument("--task_include_path", "--task-include-path", nargs="+", metavar="DIR", help="of own tasks")
    parser.add_argument("--eval_limit", "--eval-limit", type=float, metavar="N", help="documents of each task")


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
    """The formats that are uploaded."""
    return "neox" if options.upload_neox_only else "hf" if options.skip_neox_upload else "both"


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


def tasks_of(options: argparse.Namespace, site: Mapping[str, str]) -> tuple[str, ...]:
    """The tasks of the evaluation; () where there is none. Raises HubError where one is asked for and no
    tasks are named, or nothing is converted that could be evaluated."""
    if options.skip_eval:
        return ()
    if options.upload_neox_only:
        if options.eval or options.eval_tasks:
            raise HubError("--upload-neox-only: nothing is converted that could be evaluated; remove it, or --eval")
        return ()
    tasks = tuple(options.eval_tasks or site.get("NEOX_EVAL_TASKS", "").split())
    if options.eval and not tasks:
        raise HubError("--eval: no tasks; set NEOX_EVAL_TASKS (slurm/sites), or give --eval_tasks TASK ...")
    return tasks
