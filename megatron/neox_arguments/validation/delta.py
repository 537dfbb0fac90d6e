"""Checks the keys of Gated DeltaNet blocks."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.architectures import GatedDeltaNetKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs

_KIND = "gated_delta_net"


def validate_delta_nets(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the `linear_*` keys against each other and the layout, and what the blocks do not work with."""
    place = f"attention_config ({args.origin('attention_config')})"
    if _KIND not in args.attention_config:
        for name, declared in keys_of(GatedDeltaNetKeys).items():
            if getattr(args, name) != declared.default:
                problems.add(name, f"has no effect: no block of {place} is {_KIND}; remove it")
        return
    key_heads, heads = args.linear_num_key_heads, args.linear_num_value_heads
    if heads % key_heads:
        problems.add("linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads {key_heads}")
    if key_heads % args.tp:
        ranks = f"model_parallel_size {args.cite('model_parallel_size')}"
        problems.add("linear_num_key_heads", f"{key_heads} is not a multiple of {ranks}; change one of them")
    if args.gpt_j_residual:
        problems.add("gpt_j_residual", f"needs attention in each block, but {place} has {_KIND}; remove it")
    if args.lora is not None:
        problems.add("lora", f"blocks {_KIND} of {place} have no adapters; remove it, or set trainable")
