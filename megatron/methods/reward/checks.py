"""Checks of the keys of reward models."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Note problems of reward models with keys that other kinds of training read too."""
    if args.train_impl != "rm":
        return
    if not args.score_head:
        problems.add("score_head", f"false contradicts train_impl {args.cite('train_impl')}; remove it")
    if args.compat_pack_impl:
        problems.add("compat_pack_impl", "drops the last token of a row, which has the score; remove it")
