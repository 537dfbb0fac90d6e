"""Checks the keys by which a run publishes its checkpoints on the HuggingFace Hub."""

import re

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.remote_paths import is_remote


def validate_hub(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Adds problems with `push_to_hub` and `hub_model_id` that can be seen without asking the Hub."""
    if not args.push_to_hub:
        return
    if args.save is None:
        problems.add("push_to_hub", "needs save, the folder of the checkpoints that are published")
    elif is_remote(args.save):
        problems.add(
            "push_to_hub", f"needs checkpoints in a local folder, but save is {args.cite('save')}; set a local one"
        )
    if args.hub_model_id is not None and not re.fullmatch(r"[^/\s]+/[^/\s]+", args.hub_model_id):
        problems.add("hub_model_id", f"{args.hub_model_id!r} is not of the form ORGANISATION/NAME")
