"""Checks the keys of Gated DeltaNet and Kimi Delta Attention."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.architectures import DeltaRuleKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.model_args import DELTA_BLOCKS
from megatron.neox_arguments.resolved import ResolvedArgs


def validate_delta_nets(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the `linear_*` keys against each other and the layout, and what the blocks do not work with."""
    place = f"attention_config ({args.origin('attention_config')})"
    kinds = sorted({*DELTA_BLOCKS} & {*args.attention_config})
    if not kinds:
        for name, declared in keys_of(DeltaRuleKeys).items():
            if getattr(args, name) != declared.default:
                problems.add(name, f"has no effect: no block of {place} is {' or '.join(DELTA_BLOCKS)}; remove it")
        return
    key_heads, heads = args.linear_num_key_heads, args.linear_num_value_heads
    if heads % key_heads:
        problems.add("linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads {key_heads}")
    sizes = (("linear_num_key_heads", "linear_num_value_heads"), ("linear_key_head_dim", "linear_value_head_dim"))
    for name, equal_name in sizes if "kimi_delta_attention" in kinds else ():
        if getattr(args, name) != getattr(args, equal_name):
            rule = f"must be {equal_name} {args.cite(equal_name)} for kimi_delta_attention; change one"
            problems.add(name, f"{getattr(args, name)} {rule}")
    if key_heads % args.tp:
        ranks = f"model_parallel_size {args.cite('model_parallel_size')}"
        problems.add("linear_num_key_heads", f"{key_heads} is not a multiple of {ranks}; change one of them")
    if args.mamba_backend == "mamba_ssm" and not args.mamba_blocks:
        problems.add("mamba_backend", f"mamba_ssm has no delta rules ({kinds[0]} of {place}); set torch or fla")
    if args.mamba_backend == "fla" and args.context_parallel_size > 1:
        size = f"context_parallel_size {args.cite('context_parallel_size')}"
        problems.add("mamba_backend", f"fla scans full rows in {kinds[0]} blocks, which {size} divides; set torch")
    if args.gpt_j_residual:
        problems.add("gpt_j_residual", f"needs attention in each block, but {place} has {kinds[0]}; remove it")
