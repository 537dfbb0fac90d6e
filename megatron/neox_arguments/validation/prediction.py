"""Checks the keys of multi-token prediction."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.architectures import MultiTokenPredictionKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.methods import method_name
from megatron.neox_arguments.model_args import FULL_BLOCKS
from megatron.neox_arguments.resolved import ResolvedArgs

_KEY = "mtp_num_layers"


def validate_prediction(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that multi-token prediction fits the last block and the kind of training."""
    if args.mtp_num_layers is None:
        for name, declared in keys_of(MultiTokenPredictionKeys).items():
            if getattr(args, name) != declared.default:
                problems.add(name, f"is read only with {_KEY}; set that, or remove this key")
        return
    kind = args.attention_config[-1]
    if kind not in FULL_BLOCKS:
        place = f"attention_config ({args.origin('attention_config')})"
        problems.add(_KEY, f"needs a last block with a mixer and a feed-forward, not {kind} of {place}; remove it")
    if args.lora is not None:
        problems.add(_KEY, f"its blocks have no adapters; remove it, or lora ({args.origin('lora')})")
    if args.score_head:
        problems.add(_KEY, "a reward model predicts no tokens; remove it")
    elif (method := method_name(args)) != "language_modelling":
        fix = "remove it; its blocks in a checkpoint are then left out"
        problems.add(_KEY, f"trains with next-token prediction alone, not with {method}; {fix}")
