"""Checks the types of the fields of config.json and adapter_config.json before they are used."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.neox_arguments.values.integers import finite_float

Test = Callable[[Any], bool]
Types = tuple[tuple[str, Test, str], ...]
"""Entries (type in words, function that tests a value, names of the fields separated by spaces)."""


def _is_int32(value: Any) -> bool:
    """Whether a value is an int, or a float without a fraction, which `plain_values` converts to int.

    The absolute value must be below 2^31, because larger shapes would overflow."""
    is_integer = isinstance(value, int) or isinstance(value, float) and value.is_integer()
    return not isinstance(value, bool) and is_integer and abs(value) < 1 << 31


def _is_size(value: Any) -> bool:
    return _is_int32(value) and value > 0


def _is_index(value: Any) -> bool:
    return _is_int32(value) and value >= 0


def _is_number(value: Any) -> bool:
    """Whether a value is a number; infinity, which transformers writes for "no limit", is one; NaN is not."""
    return finite_float(value) is not None or isinstance(value, float) and math.isinf(value)


def _is_factor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_limit(value: Any) -> bool:
    """Whether a value is a list of two numbers; each may be {"__float__": "Infinity"}."""
    infinite = {"__float__": "Infinity"}
    return isinstance(value, list | tuple) and len(value) == 2 and all(n == infinite or _is_number(n) for n in value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or value in (0, 1) and isinstance(value, int)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list | tuple) and all(map(test, value))


def _one_or_more(test: Test) -> Test:
    return lambda value: test(value) or _list_of(test)(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_by_layer(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        str(layer).isdecimal() and isinstance(fields, Mapping) for layer, fields in value.items()
    )


# Most fields may also be null, which means absent.
_TYPES: Types = (
    (
        "a whole number above 0 and below 2^31",
        _is_size,
        "chunk_size conv_kernel experts_per_token expand hidden_size head_dim "
        "initial_context_length intermediate_size mamba_head_dim mamba_num_heads max_position_embeddings "
        "moe_latent_size n_ctx n_embd n_group n_groups "
        "n_head n_inner n_layer n_positions num_attention_heads num_heads num_hidden_layers num_key_value_heads "
        "original_max_position_embeddings _sliding_window_pattern ssm_state_size state_size "
        "no_rope_layer_interval attention_head_dim topk_group vocab_size ffn_hidden_size num_labels "
        "full_attention_interval linear_num_key_heads linear_num_value_heads linear_key_head_dim "
        "linear_value_head_dim "
        "linear_conv_kernel_dim global_head_dim num_global_key_value_heads "
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_chunk_size "
        "short_conv_kernel_size conv_L_cache block_ff_dim block_multiple_of dim_model_base "
        "num_expert_group num_kv_heads decoder_sparse_step moe_layer_interval",
    ),
    (
        "a whole number below 2^31",
        _is_int32,
        "max_window_layers moe_intermediate_size moe_shared_expert_intermediate_size "
        "n_routed_experts n_shared_experts num_experts num_experts_per_tok num_local_experts "
        "shared_expert_intermediate_size sliding_window moe_num_experts first_k_dense_replace moe_k rotary_dim "
        "moe_num_shared_experts num_shared_experts shared_intermediate_size moe_layer_start_index "
        "moe_layer_end_index hidden_size_per_layer_input num_kv_shared_layers num_dense_layers",
    ),
    (
        "a number",
        _is_number,
        "attention_factor attention_multiplier attn_factor attn_logit_softcapping beta_fast beta_slow clip_qkv "
        "embedding_multiplier factor final_logit_softcapping high_freq_factor layer_norm_eps layer_norm_epsilon "
        "layernorm_epsilon llama_4_scaling_beta logit_scale low_freq_factor mixer_rms_eps mscale "
        "mscale_all_dim norm_epsilon norm_eps partial_rotary_factor query_pre_attn_scalar residual_multiplier "
        "rms_norm_eps rope_local_base_freq rope_theta rotary_emb_base rotary_pct routed_scaling_factor "
        "router_aux_loss_coef router_jitter_noise swiglu_alpha swiglu_limit time_step_floor "
        "time_step_max time_step_min scale_depth scale_emb",
    ),
    ("a number above 0", _is_factor, "alpha block_ffn_dim_multiplier logits_scaling"),
    (
        "true or false",
        _is_flag,
        "attention_bias attention_out_bias mlp_bias norm_topk_prob output_router_logits post_norm qk_norm qkv_bias "
        "rope_interleaved scale_attn_weights tie_word_embeddings truncate use_bias "
        "use_conv_bias use_parallel_residual use_qk_norm use_qkv_bias qk_layernorm "
        "mamba_conv_bias mamba_proj_bias attention_k_eq_v enable_moe_block multi_query parallel_attn "
        "new_decoder_architecture alibi bias use_sliding_window "
        "conv_bias use_expert_bias block_auto_adjust_ff_dim tie_embedding mla_use_nope moe_renormalize",
    ),
    (
        "a string",
        _is_text,
        "activation activation_function hidden_act hidden_activation hybrid_override_pattern mamba_hidden_act "
        "mlp_hidden_act model_type position_embedding_type rope_type type torch_dtype dtype",
    ),
    ("true, false or a string", lambda value: _is_flag(value) or _is_text(value), "use_bidirectional_attention"),
    ("a list of strings", _list_of(_is_text), "architectures layer_types layers_block_type mlp_layer_types"),
    ("a whole number, or a list of them", _one_or_more(_is_int32), "moe_topk"),
    (
        "a list of whole numbers",
        _list_of(_is_index),
        "mlp_only_layers no_rope_layers full_attn_idxs full_attn_layers kda_layers",
    ),
    ("a list of numbers", _list_of(_is_number), "long_factor short_factor"),
    ("a list of two numbers", _is_limit, "time_step_limit"),
    (
        "an object ({...})",
        lambda value: isinstance(value, Mapping),
        "full_attention id2label linear_attn_config rope_parameters rope_scaling sliding_attention text_config",
    ),
    ("a map from layer numbers to objects", _is_by_layer, "per_layer_config"),
    (
        "a whole number above 0 and below 2^31, or auto",
        lambda value: _is_size(value) or value == "auto",
        "time_step_rank mamba_d_head",
    ),
    (
        "a whole number below 2^31, or letters",
        lambda value: _is_index(value) or _is_text(value),
        "sliding_window_pattern",
    ),
    ("a token id", _is_token, "bos_token_id pad_token_id"),
    ("a token id, or a list of token ids", _one_or_more(_is_token), "eos_token_id"),
)


# Fields with fields of their own that are checked.
_OBJECTS = (
    "text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "linear_attn_config",
)  # fmt: skip
_NEVER_NULL = ("hidden_size", "num_attention_heads", "num_hidden_layers", "n_embd", "full_attn_layers", "kda_layers",
               "rope_type", "type")  # fmt: skip


def _is_pattern(test: Test) -> Test:
    return lambda value: isinstance(value, Mapping) and all(map(test, value.values()))


# Types of the fields of peft's adapter_config.json.
_ADAPTER_TYPES: Types = (
    ("a whole number above 0 and below 2^31", _is_size, "r"),
    ("a number", _is_number, "lora_alpha lora_dropout"),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        "ensure_weight_tying fan_in_fan_out inference_mode use_dora use_rslora",
    ),
    ("a string", _is_text, "base_model_name_or_path bias peft_type revision task_type"),
    ("true, false or a string", lambda value: isinstance(value, bool | str), "init_lora_weights"),
    ("a string, or a list of strings", _one_or_more(_is_text), "exclude_modules layers_pattern target_modules"),
    ("a list of strings", _list_of(_is_text), "modules_to_save"),
    ("a layer number, or a list of layer numbers", _one_or_more(_is_index), "layers_to_transform"),
    ("a map from module names to whole numbers above 0", _is_pattern(_is_size), "rank_pattern"),
    ("a map from module names to numbers", _is_pattern(_is_number), "alpha_pattern"),
)


def check_fields(config: Mapping[str, Any], file: str, unread: Collection[str] = ()) -> None:
    """Raise CheckpointError if a field of config.json has a wrong type; the error names the field.

    Fields of `text_config` and of rotary parameters are checked too. file: name of the file, for errors.
    unread: fields that may have any type (`Family.unread`)."""
    # `type` is the old name of rope_type; it may be null if rope_type is set.
    never_null = _NEVER_NULL if config.get("rope_type") is None else _NEVER_NULL[:-1]
    _check({name: value for name, value in config.items() if name not in unread}, file, _TYPES, never_null)
    for name in _OBJECTS:
        if config.get(name) is not None:
            check_fields(config[name], f"{file}: {name}", unread)
    for layer, fields in (config.get("per_layer_config") or {}).items():
        check_fields(fields, f"{file}: per_layer_config.{layer}")


def plain_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with whole floats (4096.0) as int, and flags 1 and 0 as true and false.

    config: a config.json that passed `check_fields`."""
    kinds = {name: test for _, test, names in _TYPES for name in names.split()}

    def plain_value(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return plain_values(value)
        if kinds.get(name) in (_is_size, _is_int32) and isinstance(value, float):
            return int(value)
        return bool(value) if kinds.get(name) is _is_flag and value is not None else value

    return {name: plain_value(name, value) for name, value in config.items()}


def check_adapter_fields(config: Mapping[str, Any], file: str) -> None:
    """Raise CheckpointError if a field of adapter_config.json has a type that peft does not write.

    file: name of the file, for errors."""
    _check(config, file, _ADAPTER_TYPES, ())


def _check(config: Mapping[str, Any], file: str, types: Types, never_null: tuple[str, ...]) -> None:
    tests = {name: (words, test) for words, test, names in types for name in names.split()}
    for name, value in config.items():
        if name not in tests or value is None and name not in never_null:
            continue
        words, test = tests[name]
        if not test(value):
            raise CheckpointError(f"{file}: {name}: expected {words}, got {json.dumps(value, default=str)}")
