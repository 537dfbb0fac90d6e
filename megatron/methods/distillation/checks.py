"""Checks of the keys of distillation."""

from megatron.methods.distillation.keys import DistillationKeys, distillation_keys
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.remote_paths import is_remote

_CONFLICTS = {
    "sft_loss_type": "the labels' part of the loss is their negative log-likelihood",
    "z_loss": "the loss has no such term",
    "ga_dataset": "steps on it have a loss of their own",
}


def _cache(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys = distillation_keys(args)
    if keys["top_k"] is None:
        problems.add("distillation.cache", "stores the most likely tokens; set top_k to their number, say 64")
    if args.seq_curriculum is not None or (args.curriculum_learning or {}).get("enabled"):
        problems.add("distillation.cache", "stores full rows, but a curriculum cuts them; remove one of the two")
    if not args.use_shared_fs:
        problems.add("distillation.cache", "is written by many ranks into one folder; it needs use_shared_fs: true")


def _on_policy(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys = distillation_keys(args)
    if keys["cache"]:
        problems.add("distillation.cache", "cannot hold answers that the student writes in training; remove it, or "
                                           "lmbda")  # fmt: skip
    if keys["lmbda"] == 1.0 and keys["weight"] != 1.0:
        problems.add("distillation.weight", "with lmbda 1 every step is on policy, without likelihood loss; remove it")
    if args.train_label_data_paths is None:
        problems.add("distillation.lmbda", "needs train_label_data_paths: a prompt is all before the first trained "
                                           "token")  # fmt: skip
    if args.pack_impl != "unpacked":
        problems.add("distillation.lmbda", "needs one document per row; set pack_impl: unpacked (now "
                                           f"{args.cite('pack_impl')})")  # fmt: skip
    if args.seq_curriculum is not None or (args.curriculum_learning or {}).get("enabled"):
        problems.add("distillation.lmbda", "writes full rows, but a curriculum cuts them; remove one of the two")


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that a run that learns from a teacher sets no keys that distillation does not support."""
    keys = DistillationKeys.read_from(args).distillation
    if keys is None:
        return
    if args.train_impl != "normal":
        problems.add("distillation", f"needs train_impl: normal, not {args.cite('train_impl')}; remove one of them")
    for key, reason in _CONFLICTS.items():
        if getattr(args, key) != keys_of(type(args))[key].default:
            problems.add(key, f"{reason}; remove it, or distillation ({args.origin('distillation')})")
    if keys["cache"]:
        _cache(args, problems)
    elif keys["cache_dir"] is not None:
        problems.add("distillation.cache_dir", "only cache: true reads it; set that, or remove it")
    if keys["lmbda"] > 0.0:
        _on_policy(args, problems)
    elif "max_new_tokens" in (args.user_values.get("distillation") or {}):
        problems.add("distillation.max_new_tokens", "only steps on policy read it; set lmbda, or remove it")
    if is_remote(keys["teacher"]):
        problems.add("distillation.teacher", "is a remote path; download it, and set the local folder")
