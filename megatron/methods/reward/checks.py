"""Checks the configuration keys of reward models."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes keys that do not fit the training of a reward model. Does nothing unless `train_impl` is rm."""
    if args.train_impl != "rm":
        return
    if not args.score_head:
        problems.add(
            "score_head",
            f"train_impl {args.cite('train_impl')} trains a score head, but score_head is false; remove score_head",
        )
    if args.compat_pack_impl:
        problems.add(
            "compat_pack_impl",
            "drops the last token of a row, at which a reward model reads the score; remove compat_pack_impl",
        )
