"""Checks of the keys of KTO."""

from megatron.methods.kto.keys import KTOKeys
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import reference_mode


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Note problems with the keys of KTO."""
    if args.train_impl != "kto":
        return
    keys = KTOKeys.read_from(args)
    unpacked = f"needs one answer per row; set pack_impl: unpacked (now {args.cite('pack_impl')})"
    if keys.compat_kto and args.pack_impl != "unpacked":
        problems.add("compat_kto", unpacked)
    if keys.kto_kl == "rotated":
        if keys.compat_kto:
            problems.add("kto_kl", "compat_kto uses GPT-NeoX's own KL; remove one of the two")
        if args.pack_impl != "unpacked":
            problems.add("kto_kl", unpacked)
        if args.train_micro_batch_size_per_gpu == 1:
            problems.add("kto_kl", "needs several answers per micro-batch; set train_micro_batch_size_per_gpu: 2")
        if reference_mode(args) == "cache":
            problems.add("kto_kl", "rotated needs new pairs in each micro-batch, which no cache holds; set "
                                   "dpo_reference: on_the_fly")  # fmt: skip
