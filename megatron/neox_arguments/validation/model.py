"""Checks the keys of the model's shape, of how it is split over ranks, and of which parameters are
trained."""

import re

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.frozen import as_tuple
from megatron.neox_arguments.model_args import DELTA_BLOCKS, MAMBA_2_BLOCKS
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.validation.delta import validate_delta_nets
from megatron.neox_arguments.validation.experts import validate_experts
from megatron.neox_arguments.validation.latent_attention import validate_latent_attention
from megatron.neox_arguments.validation.mamba import validate_mamba
from megatron.neox_arguments.validation.prediction import validate_prediction
from megatron.neox_arguments.values.lora_settings import (
    MODULES,
    block_targets,
    chosen_blocks,
    conflicting_targets,
    copied_modules,
    is_pattern_of,
    is_targeted,
    known_targets,
    lora_targets,
)


def validate_model(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the shape of the model: heads, positions, layers, norms and the width of its MLP."""
    heads = args.num_attention_heads
    if not args.attends:
        pass  # nothing splits hidden_size into heads
    elif args.kv_lora_rank is not None:
        pass  # `validate_latent_attention` checks its widths
    elif args.hidden_size % heads and "head_dim" not in args.user_values:
        problems.add(
            "hidden_size",
            f"{args.hidden_size} is not a multiple of num_attention_heads {args.cite('num_attention_heads')}; change "
            "one, or set head_dim",
        )
    elif args.pos_emb == "rotary" and (args.rotary_width % 2 or args.rotary_width == 0):
        problems.add(
            "rotary_pct" if args.rotary_pct != 1 else "pos_emb",
            f"{args.rotary_width} of the {args.head_dim} dimensions of a head would be rotated; "
            "this number, rotary_pct x head_dim, must be even and above 0",
        )
    for kv_heads in dict.fromkeys(as_tuple(args.kv_heads)):
        if heads % kv_heads:
            message = f"{kv_heads} does not divide num_attention_heads {args.cite('num_attention_heads')}"
            problems.add("num_kv_heads", message)
    if args.seq_length > args.max_position_embeddings:
        problems.add(
            "seq_length",
            f"{args.seq_length} is more than max_position_embeddings {args.cite('max_position_embeddings')}; lower it",
        )
    if args.intermediate_size is not None and args.expansion_factor is not None:
        problems.add(
            "expansion_factor", f"intermediate_size {args.cite('intermediate_size')} sets the width too; remove one"
        )
    _positions(args, problems)
    validate_latent_attention(args, problems)
    validate_experts(args, problems)
    validate_mamba(args, problems)
    validate_delta_nets(args, problems)
    validate_prediction(args, problems)
    _layers(args, problems)
    _blocks(args, problems)
    if not args.has_dense_blocks:
        return
    try:
        ffn = args.ffn_size
    except ValueError:  # `refusals` reports it to a run; other commands may still read such files
        return
    key = "intermediate_size" if args.intermediate_size else "model_parallel_size"
    for width in dict.fromkeys(as_tuple(ffn)):
        if width % args.tp:
            ranks = f"model_parallel_size {args.cite('model_parallel_size')}"
            problems.add(key, f"the MLP's width {width} is not a multiple of {ranks}; change one of them")


def _positions(args: ResolvedArgs, problems: ErrorCollector) -> None:
    scaling = args.rope_scaling
    if args.rotary_interleaved and args.pos_emb != "rotary":
        problems.add("rotary_interleaved", f"is read only with pos_emb rotary, not {args.cite('pos_emb')}; remove it")
    if args.opt_pos_emb_offset and args.pos_emb != "learned":
        problems.add("opt_pos_emb_offset", f"is read only with pos_emb learned, not {args.cite('pos_emb')}; remove it")
    rows = args.max_position_embeddings - args.opt_pos_emb_offset
    if args.pos_emb == "learned" and args.opt_pos_emb_offset and args.seq_length > rows:
        problems.add(
            "opt_pos_emb_offset", f"leaves {rows} positions of max_position_embeddings "
            f"{args.cite('max_position_embeddings')}, too few for seq_length {args.cite('seq_length')}; raise "
            "max_position_embeddings by the offset",
        )  # fmt: skip
    if args.pos_emb == "sinusoidal" and args.hidden_size % 2:
        problems.add(
            "pos_emb", f"sinusoidal needs an even hidden_size, but that is {args.cite('hidden_size')}; set another"
        )
    if args.pos_emb == "rpe" and args.rpe_max_distance <= args.rpe_num_buckets // 2:
        problems.add(
            "rpe_max_distance", f"must be above half of rpe_num_buckets {args.cite('rpe_num_buckets')}; raise it"
        )
    if scaling is None:
        return
    kind = scaling["rope_type"]
    if args.pos_emb != "rotary":
        problems.add("rope_scaling", f"is read only with pos_emb rotary, not {args.cite('pos_emb')}; remove it")
    original = "original_max_position_embeddings"
    required = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", original),
        "dynamic": ("factor", original),
        "longrope": ("short_factor", "long_factor", original),
        "proportional": ("partial_rotary_factor",),
    }.get(kind, ("factor",))
    allowed = {
        "yarn": (*required, original, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
                 "truncate", "llama_4_scaling_beta"),
        "longrope": (*required, "attention_factor"),
        "proportional": (*required, "factor"),
    }.get(kind, required)  # fmt: skip
    for name, value in scaling.items():
        if name in required and value is None:
            problems.add("rope_scaling", f"rope_type {kind} needs {name}; set it")
        if value is not None and name not in (*allowed, "rope_type"):
            problems.add(f"rope_scaling.{name}", f"rope_type {kind} does not read it; remove it")
    if kind == "longrope" and (scaling[original] or 2) < 2:
        problems.add(f"rope_scaling.{original}", f"expected at least 2 for longrope, got {scaling[original]}")
    if scaling["llama_4_scaling_beta"] is not None and scaling[original] is None:
        problems.add("rope_scaling.llama_4_scaling_beta", f"needs {original}")
    pairs = args.rotary_width // 2
    for name in ("short_factor", "long_factor"):
        if scaling[name] is not None and kind == "longrope" and len(scaling[name]) != pairs:
            problems.add(
                f"rope_scaling.{name}", f"expected {pairs} numbers, one per pair of a head's rotated dimensions, got "
                f"{len(scaling[name])}",
            )  # fmt: skip
    fast, slow = scaling["beta_fast"] or 32, scaling["beta_slow"] or 1
    if kind == "yarn" and slow >= fast:
        problems.add("rope_scaling.beta_slow", f"{slow:g} must be less than beta_fast {fast:g}")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if kind == "llama3" and low is not None and high is not None and low >= high:
        problems.add("rope_scaling.low_freq_factor", f"{low} must be less than high_freq_factor {high}")
    if kind == "dynamic" and args.rotary_width <= 2:
        problems.add("rope_scaling", "dynamic needs more than 2 rotated dimensions per head")


def _layers(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the keys that have a value for each layer, and the sliding window."""
    sliding = args.layer_types is not None and "sliding_attention" in args.layer_types
    if sliding and args.sliding_window_width is None:
        problems.add("layer_types", "sliding_attention needs sliding_window_width; set it")
    if args.layer_types is not None and not sliding and args.sliding_window_width is not None:
        problems.add("sliding_window_width", f"no layer of layer_types ({args.origin('layer_types')}) is "
            "sliding_attention; remove one of them")  # fmt: skip
    if args.rope_local_base_freq is not None and (not sliding or args.pos_emb != "rotary"):
        problems.add("rope_local_base_freq", "needs pos_emb: rotary and sliding_attention among layer_types")
    if args.no_rope_layers is not None and (args.pos_emb != "rotary" or not set(args.no_rope_layers) <= {0, 1}):
        problems.add("no_rope_layers", "needs pos_emb: rotary, and must be a list of 0 and 1")


def _blocks(args: ResolvedArgs, problems: ErrorCollector) -> None:
    tied, shape = args.gpt_j_tied, args.norm
    if tied and not args.gpt_j_residual:
        problems.add("gpt_j_tied", "is read only with gpt_j_residual: true; remove it, or set gpt_j_residual")
    if args.norm_placement in ("olmo3", "sandwich"):
        for key in ("gpt_j_residual", "te_layernorm_mlp"):
            if getattr(args, key):
                message = f"{args.norm_placement} cannot be used with {key} {args.cite(key)}; remove one of them"
                problems.add("norm_placement", message)
    if args.te_layernorm_mlp and tied:
        problems.add("te_layernorm_mlp", f"its MLP has its own norm, so gpt_j_tied ({args.origin('gpt_j_tied')}) "
            "is impossible; remove one of them")  # fmt: skip
    if args.te_layernorm_mlp and shape in ("scalenorm", "non_parametric_layernorm"):
        problems.add(
            "te_layernorm_mlp", f"Transformer-Engine's MLP needs norm layernorm or rmsnorm, not {args.cite('norm')}"
        )
    if args.zero_centered_gamma and shape.removeprefix("te_") not in ("rmsnorm", "layernorm"):
        problems.add("zero_centered_gamma", f"needs norm: rmsnorm or layernorm, not {args.cite('norm')}")
    _attention(args, problems)
    if args.qk_norm_per_head and not args.use_separate_qk_norms:
        problems.add("qk_norm_per_head", "needs use_separate_qk_norms: true; set that, or remove this key")
    if args.qk_norm_after_rotary:
        if not args.use_separate_qk_norms:
            problems.add("qk_norm_after_rotary", "needs use_separate_qk_norms: true; set that, or remove this key")
        if args.clip_qkv is not None:
            problems.add("qk_norm_after_rotary", f"does not work with clip_qkv ({args.origin('clip_qkv')}); remove one")
    if args.use_separate_qk_norms and (not args.use_qk_layernorm or shape not in ("rmsnorm", "te_rmsnorm")):
        problems.add("use_separate_qk_norms", "needs use_qk_layernorm: true and norm: rmsnorm")
    elif args.use_qk_layernorm and not args.use_separate_qk_norms:
        _qk_layernorm(args, problems)


def _attention(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.attention_multiplier is not None and args.query_pre_attn_scalar is not None:
        place = args.origin("query_pre_attn_scalar")
        problems.add(
            "attention_multiplier", f"query_pre_attn_scalar ({place}) sets this factor too; remove one of them"
        )
    if args.attn_logit_softcapping is not None and args.attention_dropout > 0.0:
        problems.add("attn_logit_softcapping", f"needs attention_dropout 0, not {args.cite('attention_dropout')}")
    if args.attn_logit_softcapping is not None and args.pos_emb in ("rpe", "alibi"):
        problems.add("attn_logit_softcapping", f"cannot be used with position biases (pos_emb {args.cite('pos_emb')})")
    if args.attention_sinks and args.attention_dropout > 0.0:
        problems.add("attention_sinks", f"needs attention_dropout 0, not {args.cite('attention_dropout')}")
    if args.attention_sinks and args.te_mha:
        problems.add(
            "attention_sinks", f"Transformer-Engine (te_mha: {args.origin('te_mha')}) has no sinks; remove one of them"
        )
    if args.attention_output_gate and args.te_mha:
        problems.add("attention_output_gate", f"te_mha ({args.origin('te_mha')}) has no gate; remove one of them")
    if args.use_v_norm and args.te_mha:
        problems.add("use_v_norm", f"te_mha ({args.origin('te_mha')}) has no norm of values; remove one of them")
    if args.use_v_norm and not args.attends:
        problems.add("use_v_norm", "no block of attention_config has attention; remove it")
    if args.attention_k_eq_v:
        _keys_as_values(args, problems)
    if args.global_head_dim is not None:
        _global_heads(args, args.global_head_dim, problems)
    if args.attention_output_gate and not args.attends:
        problems.add("attention_output_gate", "no block of attention_config has attention; remove it")
    if args.add_qkv_bias and args.use_bias_in_attn_linear:
        place = args.cite("use_bias_in_attn_linear")
        problems.add("add_qkv_bias", f"use_bias_in_attn_linear {place} adds these biases already; remove this key")
    if args.add_qkv_bias and args.te_mha:
        problems.add("add_qkv_bias", f"te_mha ({args.origin('te_mha')}) needs all biases or none; remove one of them")


def _keys_as_values(args: ResolvedArgs, problems: ErrorCollector) -> None:
    key = "attention_k_eq_v"
    if not args.attends or all(args.has_window(block) for block in range(args.num_layers)):
        problems.add(key, "no layer has attention without a window; remove it")
    if args.te_mha:
        problems.add(key, f"te_mha ({args.origin('te_mha')}) projects values too; remove one of them")
    if args.compat_gqa_rows == "pre1315":
        problems.add(key, f"there are no rows of values to reorder (compat_gqa_rows {args.cite('compat_gqa_rows')})")


def _global_heads(args: ResolvedArgs, width: int, problems: ErrorCollector) -> None:
    key = "global_head_dim"
    if set(args.layer_types or ()) != {"full_attention", "sliding_attention"}:
        problems.add(key, "needs both full_attention and sliding_attention in layer_types; or set head_dim")
    if args.pos_emb == "rpe":
        problems.add(key, f"layers share one table of biases (pos_emb {args.cite('pos_emb')}); remove one of them")
    rotated = int(width * args.rotary_pct)
    if args.pos_emb == "rotary" and (rotated % 2 or rotated == 0):
        problems.add(key, f"{rotated} of {width} dimensions would be rotated; this must be even and above 0")
    if args.rope_scaling is not None and args.rope_scaling["rope_type"] == "longrope":
        problems.add(key, "longrope's factors are for heads of one width; remove one of them")


def _qk_layernorm(args: ResolvedArgs, problems: ErrorCollector) -> None:
    key = "use_qk_layernorm"
    if args.norm not in ("layernorm", "rmsnorm", "te_layernorm", "te_rmsnorm"):
        problems.add(key, f"needs norm layernorm or rmsnorm, not {args.cite('norm')}")
    elif min(as_tuple(args.kv_heads)) < args.num_attention_heads:
        problems.add(
            key, f"one norm needs as many key heads as query heads, not {min(as_tuple(args.kv_heads))} "
            f"(num_kv_heads: {args.origin('num_kv_heads')}); set use_separate_qk_norms: true",
        )  # fmt: skip
    elif args.te_mha:
        problems.add(key, f"is not supported with te_mha ({args.origin('te_mha')}); remove one of them")


def validate_parallel(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that the model can be split over tensor-parallel ranks and pipeline stages."""
    tp, key = args.tp, "model_parallel_size"
    if args.attends:
        _heads_of_ranks(args, problems)
    if args.padded_vocab_size is not None and args.padded_vocab_size % tp:
        problems.add(
            "padded_vocab_size", f"{args.padded_vocab_size} is not a multiple of {key} {args.cite(key)}; change one"
        )
    if args.pipeline_layers is not None:
        _blocks_of_stages(args, args.pipeline_layers, problems)
    elif (stages := args.pp * args.stages_per_rank) > args.num_layers:
        text = f"{stages} stages are more than num_layers {args.cite('num_layers')}; use fewer"
        if args.stages_per_rank > 1:
            schedule = f"pipeline_schedule {args.cite('pipeline_schedule')}"
            text = f"{args.pp} ranks with {args.stages_per_rank} stages each ({schedule}) are {text}"
        problems.add("pipe_parallel_size", text)
    if args.sequence_parallel and args.seq_length % tp and args.context_parallel_size == 1:
        problems.add(
            "sequence_parallel", f"{key} {tp} does not divide seq_length {args.cite('seq_length')}; change one"
        )
    if args.context_parallel_size > 1:
        _context(args, problems)
    method = args.pipe_partition_method
    if method.lower() not in ("uniform", "parameters", "flops") and not method.lower().startswith("type:"):
        problems.add("pipe_partition_method", f'expected uniform, parameters, flops or type:REGEX, got "{method}"')


def head_exchange_problem(args: ResolvedArgs, ranks: int) -> str | None:
    """Returns why so many context ranks cannot exchange the heads of every block evenly; None if they can."""
    heads = args.num_attention_heads // args.tp
    for kv_heads in sorted(set(as_tuple(args.kv_heads))):
        kv_heads = max(1, kv_heads // args.tp)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            return (
                f"{heads} heads of queries and {kv_heads} of keys on each tensor-parallel rank cannot be shared out to "
                f"{ranks} ranks"
            )
    return None


def _context(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Adds a problem for each part of the model that needs all tokens of a row on one rank."""
    place, size = f"context_parallel_size {args.cite('context_parallel_size')}", args.context_parallel_ulysses_size
    key = "context_parallel_ulysses_size" if size > 1 else "context_parallel_type"
    if size > 1 and args.context_parallel_type in ("auto", "ulysses"):
        kind = f"context_parallel_type {args.cite('context_parallel_type')}"
        problems.add(key, f"is for types allgather and ring, not {kind}; write one of these, or remove it")
    elif args.context_parallel_size % size:
        problems.add(key, f"{size} does not divide {place}; set a divisor")
    elif args.attends and (problem := head_exchange_problem(args, args.ulysses_size)) is not None:
        problems.add(key, f"{problem}; " + ("set another" if size > 1 else "write allgather or ring"))
    chunk = -(-args.seq_length // (2 * args.context_parallel_size))
    kernels = dict.fromkeys(MAMBA_2_BLOCKS, args.mamba_conv_kernel)
    kernels |= dict.fromkeys(DELTA_BLOCKS, args.linear_conv_kernel_dim)
    kernels["short_conv"] = args.short_conv_kernel
    for kind in sorted({*kernels} & {*args.attention_config}):
        if chunk < (tail := kernels[kind] - 1):
            problem = f"{args.seq_length} gives {place} chunks of {chunk} tokens, but {kind}'s convolution needs {tail}"
            problems.add("seq_length", f"{problem}; use longer rows, or a lower context_parallel_size")
    if "mamba" in args.attention_config:
        problems.add("attention_config", f"mamba blocks need full rows, which {place} divides; set it to 1, or mamba2")
    if args.moe_num_experts > 1 and args.moe_router_type == "sinkhorn":
        problems.add("moe_router_type", f"sinkhorn balances all tokens of a row, which {place} divides; set topk")
    if args.moe_num_experts > 1 and args.moe_expert_capacity_factor is not None:
        problems.add(
            "moe_expert_capacity_factor", f"limits the tokens of whole rows, which {place} divides; remove one of them"
        )


def _blocks_of_stages(args: ResolvedArgs, blocks: tuple[int, ...], problems: ErrorCollector) -> None:
    key, text = "pipeline_layers", f"{list(blocks)}"
    if min(blocks, default=-1) < 0 or sum(blocks) != args.num_layers:
        problems.add(key, f"{text} must be numbers of blocks that sum to num_layers {args.cite('num_layers')}")
    if 0 in blocks[1:-1]:
        problems.add(key, f"{text}: only the first and the last stage may have no block; give the others at least 1")
    if 0 in blocks and args.pos_emb == "rpe":
        place = f"pos_emb: rpe ({args.origin('pos_emb')})"
        problems.add(key, f"{text}: with {place} every stage needs a block; give each at least 1")


def _heads_of_ranks(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that each tensor-parallel rank gets whole query heads, and either whole key-value heads or an
    equal slice of one head."""
    tp, key, min_kv_heads = args.tp, "model_parallel_size", min(as_tuple(args.kv_heads))
    if args.num_attention_heads % tp:
        problems.add(key, f"{tp} does not divide num_attention_heads {args.cite('num_attention_heads')}; change one")
    elif any(heads % tp and tp % heads for heads in as_tuple(args.kv_heads)):
        problems.add(key, f"{tp} is neither a divisor nor a multiple of num_kv_heads {args.cite('num_kv_heads')}")
    elif any(
        width * heads % tp
        for heads in as_tuple(args.kv_heads)
        for width in (args.head_dim, args.global_head_dim or args.head_dim)
    ):
        dimensions = f"{args.head_dim} dimensions (head_dim) each"
        problems.add(
            key, f"{tp} ranks cannot equally divide {min_kv_heads} key-value heads of {dimensions}; set {min_kv_heads}"
        )
    elif min_kv_heads < tp and args.te_mha:
        problems.add(
            key, f"{tp} is more than num_kv_heads {args.cite('num_kv_heads')}, which te_mha does not support; "
            f"remove te_mha ({args.origin('te_mha')}), or use {min_kv_heads}",
        )  # fmt: skip


def validate_trainable(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the section `trainable`, which names the parameters that are trained."""
    if args.trainable is None:
        return
    if args.trainable["last_layers"] > args.num_layers:
        received = f"{args.trainable['last_layers']} of num_layers {args.cite('num_layers')}"
        problems.add("trainable.last_layers", f"expected at most the number of blocks, got {received}")
    for pattern in args.trainable["names"] or ():
        try:
            re.compile(pattern)
        except re.error as problem:
            problems.add("trainable.names", f"{pattern} is not a regular expression ({problem})")


def validate_lora(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the section `lora`: its names must be modules of the model, and `trainable` must not be set
    too."""
    if args.lora is None:
        return
    if args.trainable is not None:
        problems.add("lora", f"trains only adapters, but trainable ({args.origin('trainable')}) is set too; remove one")
    model_targets, targets = known_targets(args), lora_targets(args)
    if not model_targets:
        problems.add("lora", "the model has no linear for adapters (routed experts get none); remove it")
        return
    invalid_blocks = [block for block in chosen_blocks(args) if not 0 <= block < args.num_layers]
    if invalid_blocks:
        received = f"{invalid_blocks[0]} (num_layers: {args.cite('num_layers')})"
        problems.add(
            "lora.layers_to_transform", f"expected numbers of blocks from 0 to {args.num_layers - 1}, got {received}"
        )
    for name in targets:
        blocks = () if "." not in name else range(args.num_layers)
        if name not in model_targets and not any(
            is_targeted(name, target, block) for target in model_targets for block in blocks
        ):
            names_text = ", ".join(model_targets)
            problems.add("lora.target", f"{name}: not a linear of this model; set all-linear, or some of {names_text}")
    if conflicts := conflicting_targets(args):
        parts = sorted({part for _, part in conflicts})
        fused_names = ", ".join(dict.fromkeys(fused for fused, _ in conflicts))
        problems.add(
            "lora.target",
            f"{fused_names} cannot be adapted beside {', '.join(parts)}, which divide the same "
            "rows otherwise; remove one or the other",
        )
    _patterns(args, problems)
    _quantization(args, problems)
    copies = copied_modules(args)
    for name in sorted(copies - set(MODULES)):
        problems.add("lora.modules_to_save", f"{name}: expected embed_tokens (embed_in) or lm_head (embed_out)")
    if "lm_head" in copies and args.score_head:
        problems.add("lora.modules_to_save", "lm_head: a reward model has no such module; remove it")
    if "lm_head" in copies and not args.no_weight_tying and "embed_tokens" not in copies:
        problems.add(
            "lora.modules_to_save",
            "lm_head: shares its weight with the embedding (no_weight_tying: false); set embed_tokens instead, which "
            "trains both together",
        )


def _patterns(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks `lora.rank_pattern` and `lora.alpha_pattern`: regular expressions of modules, and their
    numbers."""
    assert args.lora is not None
    adapted = [(name, block) for block in range(args.num_layers) for name in block_targets(args, block)]
    for table, is_value, expected in (
        ("rank_pattern", lambda value: type(value) is int and value > 0, "a whole number above 0"),
        ("alpha_pattern", lambda value: type(value) in (int, float) and value > 0, "a number above 0"),
    ):
        for pattern, value in (args.lora[table] or {}).items():
            if not is_value(value):
                problems.add(f"lora.{table}", f"{pattern}: expected {expected}, got {value!r}")
            try:
                matches = any(is_pattern_of(pattern, name, block) for name, block in adapted)
            except re.error as problem:
                problems.add(f"lora.{table}", f"{pattern} is not a regular expression ({problem})")
                continue
            if not matches:
                names = ", ".join(dict.fromkeys(name for name, _ in adapted))
                text = f"{pattern}: matches no module with an adapter, such as {names}, layers.0.self_attn.q_proj"
                problems.add(f"lora.{table}", text)


def _quantization(args: ResolvedArgs, problems: ErrorCollector) -> None:
    assert args.lora is not None
    if not args.quantized:
        if args.lora["double_quant"]:
            problems.add("lora.double_quant", "true needs quantised weights; set lora.quantization: nf4, or remove it")
        return
    if args.lora["save"] == "both":
        problems.add(
            "lora.save", "both cannot save 4-bit base weights, which each start makes from `load` again; set adapter"
        )
    if args.precision_fp8 not in ("off", "auto"):
        place = args.cite("precision_fp8")
        problems.add("lora.quantization", f"precision_fp8 {place} cannot multiply nf4 weights; remove one of them")
