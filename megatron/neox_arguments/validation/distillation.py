"""Checks of the keys of distillation."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.remote_paths import is_remote

_NOT_WITH = {
    "sft_loss_type": "the labels' part of the loss is their negative log-likelihood",
    "z_loss": "the loss has no such term",
    "ga_dataset": "steps on it have a loss of their own",
}


def _cache(args: ResolvedArgs, problems: ErrorCollector) -> None:
    assert args.distillation is not None
    if args.distillation["top_k"] is None:
        problems.add("distillation.cache", "keeps the most likely tokens; set top_k to how many, say 64")
    if args.seq_curriculum is not None or (args.curriculum_learning or {}).get("enabled"):
        problems.add("distillation.cache", "holds whole rows, and a curriculum cuts them; remove one of them")
    if not args.use_shared_fs:
        problems.add("distillation.cache", "is written by many ranks into one folder; it needs use_shared_fs: true")


def _on_policy(args: ResolvedArgs, problems: ErrorCollector) -> None:
    assert args.distillation is not None
    if args.distillation["cache"]:
        problems.add("distillation.cache", "holds nothing of answers that the student has yet to write; remove it, or "
                                           "lmbda")  # fmt: skip
    if args.distillation["lmbda"] == 1.0 and args.distillation["weight"] != 1.0:
        problems.add("distillation.weight", "every step is on policy, whose loss is the divergence alone; remove it")
    if args.train_label_data_paths is None:
        problems.add("distillation.lmbda", "prompts are what stands before the first trained token; set "
                                           "train_label_data_paths")  # fmt: skip
    if args.pack_impl != "unpacked":
        problems.add("distillation.lmbda", "answers need the rest of a row; set pack_impl: unpacked (now "
                                           f"{args.cite('pack_impl')})")  # fmt: skip
    if args.seq_curriculum is not None or (args.curriculum_learning or {}).get("enabled"):
        problems.add("distillation.lmbda", "writes whole rows, and a curriculum cuts them; remove one of them")


def validate_distillation(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Check that what learns from a teacher asks for nothing else."""
    if args.distillation is None:
        return
    if args.train_impl != "normal":
        problems.add("distillation", f"goes with train_impl: normal, not {args.cite('train_impl')}; remove one of them")
    for key, why in _NOT_WITH.items():
        if getattr(args, key) != keys_of(type(args))[key].default:
            problems.add(key, f"{why}; remove it, or distillation ({args.origin('distillation')})")
    if args.distillation["cache"]:
        _cache(args, problems)
    elif args.distillation["cache_dir"] is not None:
        problems.add("distillation.cache_dir", "only cache: true reads it; set that, or remove it")
    if args.distillation["lmbda"] > 0.0:
        _on_policy(args, problems)
    elif "max_new_tokens" in (args.user_values.get("distillation") or {}):
        problems.add("distillation.max_new_tokens", "only steps on policy read it; set lmbda, or remove it")
    if is_remote(args.distillation["teacher"]):
        problems.add("distillation.teacher", "is remote; fetch it, and name the local folder")
