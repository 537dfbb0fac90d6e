"""Checks the configuration keys of KTO."""

from megatron.methods.kto.keys import KTOKeys
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import reference_mode


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes problems with the keys of KTO. Does nothing for other values of `train_impl`."""
    if args.train_impl != "kto":
        return
    keys = KTOKeys.read_from(args)
    unpacked = f"this setting needs one answer per row; set pack_impl: unpacked (now {args.cite('pack_impl')})"
    if keys.compat_kto and args.pack_impl != "unpacked":
        problems.add("compat_kto", unpacked)
    if keys.kto_kl == "rotated":
        if keys.compat_kto:
            problems.add(
                "kto_kl", "has no effect with compat_kto, which uses GPT-NeoX's own KL; remove kto_kl or compat_kto"
            )
        if args.pack_impl != "unpacked":
            problems.add("kto_kl", unpacked)
        if args.train_micro_batch_size_per_gpu == 1:
            problems.add(
                "kto_kl",
                "rotated pairs each prompt with the answer of another example in its micro-batch, so it needs at least "
                "2 examples; set train_micro_batch_size_per_gpu: 2 or more",
            )
        if reference_mode(args) == "cache":
            problems.add(
                "kto_kl",
                "rotated forms new prompt-answer pairs in each micro-batch, whose reference scores cannot be cached; "
                "set dpo_reference: on_the_fly",
            )
