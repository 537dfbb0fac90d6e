"""Checks the keys of the learning-rate schedule, of epochs and of curricula."""

from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.validation.data import validate_phases


def validate_schedule(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks warm-up and decay of the learning rate, epochs, and curricula of the sequence length."""
    if args.min_lr > args.lr:
        problems.add(
            "min_lr",
            f"{args.min_lr} is more than optimizer.params.lr {args.lr} ({args.origin('optimizer.params.lr')}); "
            "lower it",
        )
    if "lr_decay_iters" in args.user_values and args.lr_decay_fraction is not None:
        problems.add(
            "lr_decay_fraction", f"lr_decay_iters is set at {args.origin('lr_decay_iters')}; remove one of them"
        )
    wsd = args.lr_wsd_decay_iters
    if args.lr_decay_style == "wsd" and wsd is None:
        problems.add("lr_decay_style", "wsd needs lr_wsd_decay_iters; set it to the iterations of the final decay")
    elif args.lr_decay_style != "wsd" and wsd is not None:
        problems.add(
            "lr_wsd_decay_iters", f"is read only with lr_decay_style wsd, not {args.cite('lr_decay_style')}; remove it"
        )
    elif wsd is not None and args.lr_decay_iters is not None and wsd > args.lr_decay_iters - _warmup(args):
        problems.add(
            "lr_wsd_decay_iters",
            f"{wsd} and the warm-up ({_warmup(args):g}) do not fit into lr_decay_iters {args.cite('lr_decay_iters')}",
        )
    if args.warmup_iters is not None and "warmup" in args.user_values:
        problems.add("warmup_iters", f"warmup is set at {args.origin('warmup')}; remove one of them")
    if args.lr_decay_iters is not None and (args.warmup_iters or 0) > args.lr_decay_iters:
        problems.add(
            "warmup_iters", f"{args.warmup_iters} is more than lr_decay_iters {args.cite('lr_decay_iters')}; lower it"
        )
    if args.override_lr_scheduler and args.use_checkpoint_lr_scheduler:
        problems.add(
            "override_lr_scheduler", f"use_checkpoint_lr_scheduler ({args.origin('use_checkpoint_lr_scheduler')}) says "
            "the opposite; remove one of them",
        )  # fmt: skip
    _epochs(args, problems)
    if args.curriculum_learning is not None and args.curriculum_learning["enabled"]:
        _curriculum(args, args.curriculum_learning, problems)
        if args.seq_curriculum is not None:
            problems.add("seq_curriculum", f"curriculum_learning ({args.origin('curriculum_learning')}) sets sequence "
            "lengths too; remove one of them")  # fmt: skip
    if args.seq_curriculum is not None:
        _seq_curriculum(args, args.seq_curriculum, problems)


def _seq_curriculum(args: ResolvedArgs, section: Mapping[str, Any], problems: ErrorCollector) -> None:
    lengths, phase_ends = section["seq_len"], section["until"]
    if lengths is None or phase_ends is None:
        return  # the section's own check names what is missing
    validate_phases("seq_curriculum", "seq_len", section, problems)
    for length in lengths:
        if length < 1 or args.seq_length % length:
            problems.add(
                "seq_curriculum.seq_len", f"{length} does not divide seq_length {args.cite('seq_length')}: samples are "
                "cut into rows of this length",
            )  # fmt: skip
    if args.pack_impl != "packed":
        problems.add("seq_curriculum", f"needs pack_impl: packed, not {args.cite('pack_impl')}; remove it")


def _warmup(args: ResolvedArgs) -> float:
    return args.warmup * args.lr_decay_iters if args.warmup_iters is None else args.warmup_iters


def _epochs(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.train_epochs is None:
        return
    if args.train_iters is not None:
        problems.add("train_epochs", f"train_iters is set at {args.origin('train_iters')}; remove one of them")
    for key in ("train_data_weights", "weight_by_num_documents", "weight_by", "train_data_weight_schedule"):
        if getattr(args, key) not in (None, False) and set(args.train_data_weights or ()) != {1.0}:
            problems.add(
                "train_epochs",
                f"reads every data set in full, so weights have no effect; remove {key} ({args.origin(key)})",
            )


def _curriculum(args: ResolvedArgs, section: Mapping[str, Any], problems: ErrorCollector) -> None:
    path, schedule, kind = "curriculum_learning", section["schedule_config"], section["schedule_type"]
    missing = [name for name in ("min_difficulty", "max_difficulty", "schedule_config") if section[name] is None]
    if missing:
        problems.add(path, f"needs {', '.join(missing)}; set these sub-keys")
        return
    if section["min_difficulty"] > section["max_difficulty"]:
        problems.add(f"{path}.min_difficulty", f"is more than max_difficulty {section['max_difficulty']}; lower it")
    required = {
        "fixed_linear": ("total_curriculum_step", "difficulty_step"),
        "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
        "fixed_discrete": ("difficulty", "max_step"),
    }[kind]
    for name, value in schedule.items():
        if name in required and value is None:
            problems.add(f"{path}.schedule_config", f"schedule_type {kind} needs {name}; set it")
        if name not in required and value is not None:
            problems.add(f"{path}.schedule_config.{name}", f"schedule_type {kind} does not read it; remove it")
    lengths, ends = schedule["difficulty"], schedule["max_step"]
    if ends is not None and list(ends) != sorted(set(ends)):
        problems.add(f"{path}.schedule_config.max_step", f"expected increasing iterations, got {list(ends)}")
    if kind == "fixed_discrete" and lengths and ends is not None and len(lengths) != len(ends) + 1:
        problems.add(
            f"{path}.schedule_config.max_step",
            f"expected {len(lengths) - 1} iterations, one fewer than difficulty has, got {len(ends)}",
        )
