"""Checks the keys of data: weights of blended sets, how documents become samples, labels, rewards and
pairs."""

from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import row_places, sample_kind

_WEIGHT_KEYS = ("weight_by_num_documents", "weight_by", "train_data_weight_schedule")


def validate_weights(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the weights of blended data sets: only one key may set them, and each set needs a weight."""
    chosen_keys = [key for key in _WEIGHT_KEYS if getattr(args, key) not in (None, False)]
    for key in chosen_keys:
        paths_key = "pos_train_data_paths" if args.dataset_impl == "pairwise" else "train_data_paths"
        if getattr(args, paths_key) is None:
            problems.add(key, f"sets weights for {paths_key}, which is not set; remove it")
        elif key != chosen_keys[0]:
            problems.add(key, f"{chosen_keys[0]} ({args.origin(chosen_keys[0])}) sets the weights; remove one")
    if args.train_data_weight_schedule is not None and args.train_data_weights is not None:
        problems.add("train_data_weights", f"{_WEIGHT_KEYS[2]} ({args.origin(_WEIGHT_KEYS[2])}) sets them; remove one")
    alpha = keys_of(type(args))["weighted_sampler_alpha"].default
    if args.weighted_sampler_alpha != alpha and not (args.weight_by_num_documents or args.weight_by):
        problems.add(
            "weighted_sampler_alpha", "is read only with weight_by_num_documents: true or weight_by; remove it"
        )
    if args.compat_weight_by_num_documents and not args.weight_by_num_documents:
        problems.add("compat_weight_by_num_documents", "is read only with weight_by_num_documents: true; remove it")
    schedule = args.train_data_weight_schedule
    if schedule is None or args.train_data_paths is None or None in (schedule["weights"], schedule["until"]):
        return
    path, sets = "train_data_weight_schedule", len(args.train_data_paths)
    validate_phases(path, "weights", schedule, problems)
    for number, weights in enumerate(schedule["weights"], 1):
        if len(weights) != sets:
            problems.add(f"{path}.weights", f"phase {number}: expected {sets} weights, got {len(weights)}")
        elif min(weights) < 0 or not sum(weights):
            problems.add(f"{path}.weights", f"phase {number}: expected numbers of at least 0, one of them above 0")


def validate_phases(path: str, name: str, section: Mapping[str, Any], problems: ErrorCollector) -> None:
    """Checks `until` of a section with phases: the last iterations of all phases but the last.

    The iterations must increase. path: the section's key. name: its sub-key with one value per phase.
    """
    phase_ends, count = section["until"], len(section[name])
    if len(phase_ends) != count - 1:
        problems.add(
            f"{path}.until", f"expected {count - 1} iterations for {count} phases of {name}, got {len(phase_ends)}"
        )
    if list(phase_ends) != sorted(set(phase_ends)) or min(phase_ends, default=1) < 1:
        problems.add(f"{path}.until", f"expected increasing iterations from 1 on, got {list(phase_ends)}")


def validate_packing(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the keys that say how documents become samples, and the data sets of their labels and
    rewards."""
    if args.drop_last is not None and args.pack_impl != "packed":
        problems.add("drop_last", f"needs pack_impl: packed; remove it, or pack_impl {args.cite('pack_impl')}")
    if args.compat_group_texts_batch is not None and args.drop_last is None:
        problems.add("compat_group_texts_batch", "is read only with drop_last; set drop_last: true, or remove it")
    if args.compat_pack_impl:
        if args.pack_impl not in ("pack_until_overflow", "unpacked"):
            problems.add("compat_pack_impl", "is read only with pack_impl: pack_until_overflow or unpacked; remove it")
        for key in ("train_epochs", "truncate_documents"):
            if getattr(args, key) is not None:
                problems.add(key, f"GPT-NeoX's packing does not support it; remove it, or compat_pack_impl "
                             f"({args.origin('compat_pack_impl')})")  # fmt: skip
    for name in ("train", "valid", "test"):
        for kind in ("label", "reward"):
            key = f"{name}_{kind}_data_paths"
            margins = kind == "reward" and args.train_impl == "rm"
            owner = f"pos_{name}_data_paths" if margins else f"{name}_data_paths"
            companion_paths, paths = getattr(args, key), getattr(args, owner)
            if companion_paths is None:
                continue
            if paths is None:
                fix = "" if margins else f"; set {owner} instead of data_path"
                problems.add(key, f"needs {owner}, which is not set{fix}")
            elif len(companion_paths) != len(paths):
                problems.add(key, f"expected one path for each of the {len(paths)} {owner} ({args.origin(owner)}), got "
                             f"{len(companion_paths)}")  # fmt: skip
            if kind == "reward" and args.pack_impl != "unpacked" and sample_kind(args) == "texts":
                problems.add(key, f"a row has only one reward; set pack_impl: unpacked (now {args.cite('pack_impl')})")


def validate_pairs(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that the data are of the kind that the losses read: texts, pairs of answers, or judged
    answers."""
    pairwise = args.dataset_impl == "pairwise"
    if pairwise and sample_kind(args) in ("texts", "generated"):
        problems.add(
            "dataset_impl", f"pairwise is for train_impl dpo, kto and rm, not {args.cite('train_impl')}; change one"
        )
    if sample_kind(args) == "pairs" and not pairwise:
        alternative = ", or dataset_impl: online with rollout" if args.train_impl == "dpo" else ""
        problems.add(
            "dataset_impl", f"train_impl {args.cite('train_impl')} reads pairs; set dataset_impl: pairwise{alternative}"
        )
    _answers(args, problems)
    if pairwise and args.pos_train_data_paths is None:
        problems.add(
            "pos_train_data_paths", "is required by dataset_impl: pairwise, together with neg_train_data_paths"
        )
    for name in ("train", "valid", "test"):
        for middle in ("", "_label"):
            keys = f"pos_{name}{middle}_data_paths", f"neg_{name}{middle}_data_paths"
            pos, neg = getattr(args, keys[0]), getattr(args, keys[1])
            written = keys[0] if pos is not None else keys[1]
            if pos is None and neg is None:
                continue
            if not pairwise:
                problems.add(written, "is read only with dataset_impl: pairwise; set that, or remove it")
            elif pos is None or neg is None or len(pos) != len(neg):
                problems.add(written, f"expected as many paths in {keys[0]} as in {keys[1]}")
            elif len(pos) != len(getattr(args, f"pos_{name}_data_paths") or ()):
                problems.add(written, f"expected one path of labels for each of pos_{name}_data_paths, got {len(pos)}")


def _answers(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if sample_kind(args) in ("texts", "generated"):
        for key in ("max_length", "max_prompt_length"):
            if getattr(args, key) is not None:
                problems.add(key, f"is for preference data from files, not train_impl {args.cite('train_impl')} with "
                             f"dataset_impl {args.cite('dataset_impl')}; remove it")  # fmt: skip
        return
    if args.pack_impl == "packed":
        problems.add("pack_impl", "packed would split answers over rows; set unpacked, pack_until_overflow or best_fit")
    if sample_kind(args) == "answers" and args.dataset_impl == "gpt2":
        if args.data_path is not None:
            problems.add("data_path", "KTO does not read it; set train_data_paths, with label and reward paths")
        for name in ("train", "valid", "test"):
            for kind in ("label", "reward"):
                if getattr(args, f"{name}_data_paths") and getattr(args, f"{name}_{kind}_data_paths") is None:
                    problems.add(f"{name}_data_paths", f"KTO also needs {name}_{kind}_data_paths; set it")
    for key, reason in (
        ("seq_curriculum", "would cut answers off"),
        ("curriculum_learning", "would cut answers off"),
        ("train_data_weight_schedule", "is for language modelling"),
        ("eod_mask_loss", "is for language modelling: an answer's labels say what is trained"),
        ("loss_mask_token_ids", "is for language modelling: an answer's labels say what is trained"),
    ):
        value = getattr(args, key)
        if value and (key != "curriculum_learning" or value["enabled"]):
            problems.add(key, f"{reason}; remove it, or train_impl {args.cite('train_impl')}")
    longest, prompt = args.max_length, args.max_prompt_length
    if longest is not None and longest > row_places(args):
        room = row_places(args)
        problems.add(
            "max_length", f"allows {longest} tokens for a prompt with its answer, but a row holds {room} (seq_length "
            f"{args.cite('seq_length')}); set seq_length to {args.seq_length + longest - room} or more, or max_length "
            f"to {room} or less",
        )  # fmt: skip
    if longest is not None and prompt is not None and prompt >= longest:
        problems.add("max_prompt_length", f"leaves no room for the answer in max_length {longest}; lower it")
    if args.compat_pack_impl:
        for key in ("max_length", "max_prompt_length"):
            if getattr(args, key) is not None:
                problems.add(
                    key, f"GPT-NeoX's packing lacks it; remove it, or compat_pack_impl {args.cite('compat_pack_impl')}"
                )
