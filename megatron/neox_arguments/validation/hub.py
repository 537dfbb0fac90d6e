"""Checks of the keys by which a run publishes its checkpoints."""

import re

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.remote_paths import is_remote


def validate_hub(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes missing or invalid keys of `push_to_hub`, as far as the configuration alone shows them."""
    if not args.push_to_hub:
        return
    if args.save is None:
        problems.add("push_to_hub", "needs save, the folder of the checkpoints that are published")
    elif is_remote(args.save):
        problems.add("push_to_hub", f"reads checkpoints of a folder, and save {args.cite('save')} is remote; set one")
    if args.hub_model_id is not None and not re.fullmatch(r"[^/\s]+/[^/\s]+", args.hub_model_id):
        problems.add("hub_model_id", f"{args.hub_model_id!r} is not ORGANISATION/NAME")
