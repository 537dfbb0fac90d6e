"""Checks of how the sets of a blend are weighed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.declare import keys_of
from megatron.neox_arguments.errors import Problems
from megatron.neox_arguments.validate_model import at

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs

KINDS = ("weight_by_num_documents", "weight_by", "train_data_weight_schedule")


def validate_weights(args: "NeoXArgs", problems: Problems) -> None:
    used = [key for key in KINDS if getattr(args, key) not in (None, False)]
    for key in used:
        if args.train_data_paths is None:
            problems.add(key, "weighs the sets of train_data_paths, which is not set; remove it")
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


def validate_pairs(args: "NeoXArgs", problems: Problems) -> None:
    pairwise = args.dataset_impl == "pairwise"
    if pairwise and args.pack_impl == "packed":
        problems.add("pack_impl", "pairs are whole documents; set unpacked, pack_until_overflow or best_fit")
    if pairwise and args.train_impl not in ("dpo", "rm"):
        problems.add("dataset_impl", f"pairs are for train_impl dpo and rm, not {at(args, 'train_impl')}")
    if pairwise and args.pos_train_data_paths is None:
        problems.add("pos_train_data_paths", "is required by dataset_impl: pairwise, with neg_train_data_paths")
    for name in ("train", "valid", "test"):
        for middle in ("", "_label"):
            keys = f"pos_{name}{middle}_data_paths", f"neg_{name}{middle}_data_paths"
            pos, neg = getattr(args, keys[0]), getattr(args, keys[1])
            given = keys[0] if pos is not None else keys[1]
            if pos is None and neg is None:
                continue
            if not pairwise:
                problems.add(given, "only dataset_impl: pairwise reads it; set that, or remove it")
            elif pos is None or neg is None or len(pos) != len(neg):
                problems.add(given, f"{keys[0]} and {keys[1]} come together, as many of one as of the other")
            elif len(pos) != len(getattr(args, f"pos_{name}_data_paths") or ()):
                problems.add(given, f"expected labels for each of pos_{name}_data_paths, got {len(pos)}")


def phases(path: str, name: str, section: Mapping[str, Any], problems: Problems) -> None:
    """The borders of phases: one fewer than there are phases, rising."""
    until, count = section["until"], len(section[name])
    if len(until) != count - 1:
        problems.add(f"{path}.until", f"expected {count - 1} iterations for {count} phases of {name}, got {len(until)}")
    if list(until) != sorted(set(until)) or min(until, default=1) < 1:
        problems.add(f"{path}.until", f"expected rising iterations from 1 on, got {list(until)}")
