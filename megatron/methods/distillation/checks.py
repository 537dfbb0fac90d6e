"""Checks the configuration keys of distillation."""

from megatron.methods.distillation.keys import DistillationKeys, distillation_keys
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.remote_paths import is_remote

_CONFLICTS = {
    "sft_loss_type": "distillation always uses the negative log-likelihood as loss of the labels",
    "z_loss": "the loss of distillation has no z-loss term",
    "valid_sets": "the divergence from the teacher is validated on valid_data_paths alone",
    "ga_dataset": "distillation cannot be combined with unlearning",
}


def _cache(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys = distillation_keys(args)
    if keys["top_k"] is None:
        problems.add(
            "distillation.cache",
            "the cache stores the teacher's top_k most likely tokens, but top_k is unset; set distillation.top_k, say "
            "64",
        )
    if args.seq_curriculum is not None or (args.curriculum_learning or {}).get("enabled"):
        problems.add(
            "distillation.cache",
            "the cache stores scores of full rows, but the curriculum (seq_curriculum or curriculum_learning) "
            "truncates rows; remove distillation.cache or the curriculum",
        )
    if not args.use_shared_fs:
        problems.add(
            "distillation.cache",
            "many ranks write the cache into one folder, but use_shared_fs is false; set use_shared_fs: true and a "
            "folder that all nodes share, or remove distillation.cache",
        )


def _on_policy(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys = distillation_keys(args)
    if keys["cache"]:
        problems.add(
            "distillation.cache",
            "the cache is filled before training, but with lmbda above 0 the student writes new answers during "
            "training; remove distillation.cache or distillation.lmbda",
        )
    if keys["lmbda"] == 1.0 and keys["weight"] != 1.0:
        problems.add(
            "distillation.weight",
            "has no effect with lmbda: 1, since the loss of on-policy steps is the divergence alone; remove "
            "distillation.weight",
        )
    if args.train_label_data_paths is None:
        problems.add(
            "distillation.lmbda",
            "on-policy steps need train_label_data_paths: the prompt of a row is everything before its first trained "
            "token; set train_label_data_paths, or remove distillation.lmbda",
        )
    if args.pack_impl != "unpacked":
        problems.add(
            "distillation.lmbda",
            f"on-policy steps need one document per row; set pack_impl: unpacked (now {args.cite('pack_impl')})",
        )
    if args.seq_curriculum is not None or (args.curriculum_learning or {}).get("enabled"):
        problems.add(
            "distillation.lmbda",
            "on-policy steps write full rows, but the curriculum (seq_curriculum or curriculum_learning) truncates "
            "rows; remove distillation.lmbda or the curriculum",
        )


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes problems of a distillation run: keys that distillation does not support, or that lack another
    key."""
    keys = DistillationKeys.read_from(args).distillation
    if keys is None:
        return
    if args.train_impl != "normal":
        problems.add(
            "distillation",
            f"distillation needs train_impl: normal, not {args.cite('train_impl')}; change train_impl, or remove "
            "distillation",
        )
    for key, reason in _CONFLICTS.items():
        if getattr(args, key) != keys_of(type(args))[key].default:
            problems.add(key, f"{reason}; remove this key, or distillation ({args.origin('distillation')})")
    if keys["cache"]:
        _cache(args, problems)
    elif keys["cache_dir"] is not None:
        problems.add(
            "distillation.cache_dir",
            "has no effect while distillation.cache is false; set distillation.cache: true, or remove cache_dir",
        )
    if keys["lmbda"] > 0.0:
        _on_policy(args, problems)
    elif "max_new_tokens" in (args.user_values.get("distillation") or {}):
        problems.add(
            "distillation.max_new_tokens",
            "has no effect while distillation.lmbda is 0, since only on-policy steps write answers; set "
            "distillation.lmbda above 0, or remove max_new_tokens",
        )
    if is_remote(keys["teacher"]):
        problems.add(
            "distillation.teacher",
            "the teacher cannot be read from a remote path; download it, and set distillation.teacher to the folder",
        )
