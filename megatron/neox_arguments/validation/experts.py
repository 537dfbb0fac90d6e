"""Checks the keys of mixtures of experts, and how experts are distributed over ranks."""

from collections.abc import Iterator

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.architectures import MoEKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs

# Keys that change nothing without a router of this kind.
_TOPK_KEYS = ("moe_router_bias_update_rate", "moe_router_num_groups", "moe_jitter_eps")


def validate_experts(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the `moe_*` keys against each other and against the parallel layout."""
    experts, key = args.moe_num_experts, "moe_num_experts"
    if experts == 1:
        for name, declared in keys_of(MoEKeys).items():
            inert = declared.no_effect is not None or declared.source == "upstream"  # as GPT-NeoX's files repeat them
            if name != key and not inert and getattr(args, name) != declared.default:
                problems.add(name, f"needs {key} above 1, but that is {args.cite(key)}; raise that, or remove this key")
        return
    if args.moe_layer_freq is not None and not set(args.moe_layer_freq) <= {0, 1}:
        problems.add("moe_layer_freq", "expected a list of 1 (block with experts) and 0 (dense block)")
    elif args.moe_layer_freq is not None and 1 not in args.moe_layer_freq and "moe" not in args.attention_config:
        problems.add("moe_layer_freq", f"lists no 1, so no block has experts; list a 1, or set {key}: 1")
    if args.moe_layer_freq is not None and args.moe_expert_interval != 1:
        place = args.origin("moe_expert_interval")
        problems.add("moe_layer_freq", f"moe_expert_interval ({place}) sets this too; remove one of them")
    if isinstance(args.intermediate_size, tuple) and args.moe_intermediate_size is None:
        problems.add("moe_intermediate_size", "is required if intermediate_size is a list; set the width of an expert")
    if args.moe_intermediate_size is None and args.intermediate_size is None:
        for name in ("expansion_factor", "mlp_multiple_of"):
            if getattr(args, name) != keys_of(type(args))[name].default:
                dense_key = f"{name} ({args.origin(name)}), which is for dense feed-forwards only"
                problems.add("moe_intermediate_size", f"is required with {dense_key}")
    _choice(args, problems)
    if args.moe_shared_expert_gate and args.moe_shared_expert_intermediate_size is None:
        problems.add("moe_shared_expert_gate", "needs moe_shared_expert_intermediate_size; set it, or remove this key")
    if args.te_layernorm_mlp:
        problems.add(
            "te_layernorm_mlp", f"Transformer-Engine's MLP has no experts ({key}: {args.origin(key)}); remove one"
        )
    if args.activation == "xielu":
        problems.add("activation", f"experts do not support xielu ({key}: {args.cite(key)}); set another activation")
    if args.moe_aux_loss_scope == "transformers" and args.pp > 1:
        stages = f"pipe_parallel_size {args.cite('pipe_parallel_size')}"
        problems.add(
            "moe_aux_loss_scope", f"transformers needs all layers on one rank, not {stages}; set another scope"
        )
    _layout(args, problems)


def router_notes(args: ResolvedArgs) -> Iterator[str]:
    """Yields a line for each reason why training may leave a router unchanged, or may use only a few
    experts."""
    if args.moe_num_experts == 1:
        return
    if not (args.moe_aux_loss_coeff or args.moe_router_bias_update_rate or args.moe_router_type == "sinkhorn"):
        yield (
            "nothing balances the experts: set moe_aux_loss_coeff or moe_router_bias_update_rate, unless their router "
            "is not trained"
        )
    if args.moe_top_k == 1 and args.norm_topk_prob:
        place = args.origin("norm_topk_prob")
        yield (
            f"norm_topk_prob ({place}) with moe_top_k 1 divides a token's only score by itself: it is always 1, so the "
            "router does not learn"
        )


def _choice(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the keys by which tokens choose experts."""
    experts, groups, groups_key = args.moe_num_experts, args.moe_router_num_groups, "moe_router_num_groups"
    if args.moe_top_k > experts:
        problems.add(
            "moe_top_k", f"{args.moe_top_k} is more than moe_num_experts {args.cite('moe_num_experts')}; lower it"
        )
    if args.moe_router_type == "sinkhorn":
        for name in _TOPK_KEYS:
            if getattr(args, name):
                router_type = f"moe_router_type {args.cite('moe_router_type')}"
                problems.add(name, f"works only with topk, not {router_type}; set topk, or remove it")
    if groups is None:
        if args.moe_router_group_topk is not None:
            problems.add("moe_router_group_topk", f"needs {groups_key}; set it, or remove this key")
        if args.moe_router_group_score != "best_two":
            problems.add("moe_router_group_score", f"needs {groups_key}; set it, or remove this key")
        return
    if experts % groups:
        problems.add(groups_key, f"{groups} does not divide moe_num_experts {args.cite('moe_num_experts')}; change one")
        return
    if args.moe_router_group_topk is None:
        problems.add(groups_key, "needs moe_router_group_topk, the number of groups for each token")
        return
    group_topk = args.moe_router_group_topk
    if group_topk > groups:
        problems.add(
            "moe_router_group_topk", f"{group_topk} is more than {groups_key} {args.cite(groups_key)}; lower it"
        )
    elif args.moe_top_k > group_topk * (experts // groups):
        problems.add(
            "moe_top_k",
            f"{args.moe_top_k} is more than the experts in {group_topk} groups (moe_router_group_topk); lower it",
        )


def _layout(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that experts can be distributed over ranks: numbers and widths must be divisible."""
    experts, tp, key = args.moe_num_experts, args.tp, "expert_parallel_size"
    unsharded = args.moe_expert_tensor_parallel == "whole"
    ranks = args.expert_parallel_size * (tp if unsharded else 1)
    if experts % ranks:
        sizes = f"model_parallel_size {args.cite('model_parallel_size')}"
        if args.expert_parallel_size > 1:
            sizes = f"{key} {args.cite(key)}" + (f" times {sizes}" if unsharded and tp > 1 else "")
        alternative = ", or set moe_expert_tensor_parallel: cut" if unsharded and tp > 1 else ""
        problems.add("moe_num_experts", f"{experts} is not a multiple of {sizes}; change one{alternative}")
    if not unsharded and args.expert_ffn_size % tp:
        width, ranks_of = args.expert_ffn_size, f"model_parallel_size {args.cite('model_parallel_size')}"
        problems.add(
            "moe_expert_tensor_parallel", f"the width {width} of an expert is not a multiple of {ranks_of}; set whole"
        )
    shared = args.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        ranks_of = f"model_parallel_size {args.cite('model_parallel_size')}"
        problems.add(
            "moe_shared_expert_intermediate_size", f"{shared} is not a multiple of {ranks_of}; change one of them"
        )
