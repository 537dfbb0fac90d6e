"""Checks of how the sets of a blend are weighed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.declare import keys_of
from megatron.neox_arguments.errors import Problems

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs

KINDS = ("weight_by_num_documents", "weight_by", "train_data_weight_schedule")


def validate_weights(args: "NeoXArgs", problems: Problems) -> None:
    used = [key for key in KINDS if getattr(args, key) not in (None, False)]
    for key in used:
        listed = "pos_train_data_paths" if args.dataset_impl == "pairwise" else "train_data_paths"
        if getattr(args, listed) is None:
            problems.add(key, f"weighs the sets of {listed}, which is not set; remove it")
        elif key != used[0]:
            problems.add(key, f"{used[0]} ({args.origin(used[0])}) sets the weights; remove one")
    if args.train_data_weight_schedule is not None and args.train_data_weights is not None:
        problems.add("train_data_weights", f"{KINDS[2]} ({args.origin(KINDS[2])}) sets it; remove one")
    alpha = keys_of(type(args))["weighted_sampler_alpha"].default
    if args.weighted_sampler_alpha != alpha and not (args.weight_by_num_documents or args.weight_by):
        problems.add("weighted_sampler_alpha", "only weight_by_num_documents: true and weight_by read it; remove it")
    if args.compat_weight_by_num_documents and not args.weight_by_num_documents:
        problems.add("compat_weight_by_num_documents", "only weight_by_num_documents: true reads it; remove it")
    schedule = args.train_data_weight_schedule
    if schedule is None or args.train_data_paths is None or None in (schedule["weights"], schedule["until"]):
        return
    path, sets = "train_data_weight_schedule", len(args.train_data_paths)
    phases(path, "weights", schedule, problems)
    for number, weights in enumerate(schedule["weights"], 1):
        if len(weights) != sets:
            problems.add(f"{path}.weights", f"phase {number}: expected {sets} weights, got {len(weights)}")
        elif min(weights) < 0 or not sum(weights):
            problems.add(f"{path}.weights", f"phase {number}: expected numbers from 0 on, at least one above it")


def phases(path: str, name: str, section: Mapping[str, Any], problems: Problems) -> None:
    """The borders of phases: one fewer than there are phases, rising."""
    until, count = section["until"], len(section[name])
    if len(until) != count - 1:
        problems.add(f"{path}.until", f"expected {count - 1} iterations for {count} phases of {name}, got {len(until)}")
    if list(until) != sorted(set(until)) or min(until, default=1) < 1:
        problems.add(f"{path}.until", f"expected rising iterations from 1 on, got {list(until)}")
