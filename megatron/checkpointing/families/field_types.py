"""The types of the fields of config.json and adapter_config.json that are read here, checked by name before
anything is computed from them, whatever the family."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.checkpointing.errors import CheckpointError

Test = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    """A float without a fraction too: `plain_values` makes an int of it."""
    return not isinstance(value, bool) and (isinstance(value, int) or isinstance(value, float) and value.is_integer())


def _is_size(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_index(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_number(value: Any) -> bool:
    """Infinity too, which transformers writes for a limit that there is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_limit(value: Any) -> bool:
    """Two numbers, of which transformers 5 writes an infinite one as an object."""
    infinite = {"__float__": "Infinity"}
    return isinstance(value, list | tuple) and len(value) == 2 and all(n == infinite or _is_number(n) for n in value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or value in (0, 1) and isinstance(value, int)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list | tuple) and all(map(test, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# What a field must be, in words and as a test, and the fields; null mostly is as if they were not there.
_TYPES: tuple[tuple[str, Test, str], ...] = (
    (
        "a whole number above 0",
        _is_size,
        "chunk_size conv_kernel experts_per_token expand hidden_size head_dim "
        "initial_context_length intermediate_size mamba_head_dim mamba_num_heads max_position_embeddings "
        "moe_latent_size n_ctx n_embd n_group n_groups "
        "n_head n_inner n_layer n_positions num_attention_heads num_heads num_hidden_layers num_key_value_heads "
        "original_max_position_embeddings sliding_window_pattern _sliding_window_pattern ssm_state_size state_size "
        "no_rope_layer_interval attention_head_dim topk_group vocab_size num_labels",
    ),
    (
        "a whole number",
        _is_whole,
        "decoder_sparse_step max_window_layers moe_intermediate_size moe_shared_expert_intermediate_size "
        "n_routed_experts n_shared_experts num_experts num_experts_per_tok num_local_experts "
        "shared_expert_intermediate_size sliding_window moe_num_experts first_k_dense_replace",
    ),
    (
        "a number",
        _is_number,
        "attention_factor attention_multiplier attn_factor attn_logit_softcapping beta_fast beta_slow clip_qkv "
        "embedding_multiplier factor final_logit_softcapping high_freq_factor layer_norm_eps layer_norm_epsilon "
        "layernorm_epsilon llama_4_scaling_beta logit_scale logits_scaling low_freq_factor mixer_rms_eps mscale "
        "mscale_all_dim norm_epsilon norm_eps partial_rotary_factor query_pre_attn_scalar residual_multiplier "
        "rms_norm_eps rope_local_base_freq rope_theta rotary_emb_base rotary_pct routed_scaling_factor "
        "router_aux_loss_coef router_jitter_noise swiglu_alpha swiglu_limit time_step_floor "
        "time_step_max time_step_min",
    ),
    (
        "true or false",
        _is_flag,
        "attention_bias attention_out_bias mlp_bias norm_topk_prob output_router_logits post_norm qk_norm qkv_bias "
        "rope_interleaved scale_attn_weights tie_word_embeddings truncate use_bias use_bidirectional_attention "
        "use_conv_bias use_parallel_residual use_qk_norm use_sliding_window",
    ),
    (
        "a text",
        _is_text,
        "activation_function hidden_act hidden_activation hybrid_override_pattern mamba_hidden_act mlp_hidden_act "
        "model_type rope_type type torch_dtype dtype",
    ),
    ("a list of texts", _list_of(_is_text), "architectures layer_types layers_block_type"),
    ("a list of whole numbers", _list_of(_is_index), "mlp_only_layers no_rope_layers"),
    ("a list of numbers", _list_of(_is_number), "long_factor short_factor"),
    ("two numbers", _is_limit, "time_step_limit"),
    (
        "an object",
        lambda value: isinstance(value, Mapping),
        "full_attention id2label rope_parameters rope_scaling sliding_attention text_config",
    ),
    ("a whole number above 0, or auto", lambda value: _is_size(value) or value == "auto", "time_step_rank"),
    ("a token's number", _is_token, "bos_token_id pad_token_id"),
    (
        "a token's number, or a list of them",
        lambda value: _is_token(value) or _list_of(_is_token)(value),
        "eos_token_id",
    ),
)


_NEVER_NULL = ("hidden_size", "num_attention_heads", "num_hidden_layers", "rope_type", "type")


# Of peft's adapter_config.json.
_ADAPTER_TYPES: tuple[tuple[str, Test, str], ...] = (
    ("a whole number above 0", _is_size, "r"),
    ("a number", _is_number, "lora_alpha lora_dropout"),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        "ensure_weight_tying fan_in_fan_out inference_mode use_dora use_rslora",
    ),
    ("a text", _is_text, "base_model_name_or_path bias peft_type revision task_type"),
    ("true, false or a text", lambda value: isinstance(value, bool | str), "init_lora_weights"),
    ("a text, or a list of texts", lambda value: _is_text(value) or _list_of(_is_text)(value), "target_modules"),
    ("a list of texts", _list_of(_is_text), "modules_to_save"),
)


def check_fields(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError, naming the field, for one of config.json that has another type than models of
    any family have there; so, too, of `text_config` and of the tables of rotary positions. where: the
    file."""
    never_null = _NEVER_NULL if config.get("rope_type") is None else _NEVER_NULL[:-1]  # its old name beside it
    _check(config, where, _TYPES, never_null)
    for name in ("text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention"):
        if config.get(name) is not None:
            check_fields(config[name], f"{where}: {name}")


def plain_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that `check_fields` takes, with an int for each whole number that it writes as a float
    (4096.0), and true or false for 1 or 0."""
    kinds = {name: test for _, test, names in _TYPES for name in names.split()}

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return plain_values(value)
        if kinds.get(name) in (_is_size, _is_whole) and isinstance(value, float):
            return int(value)
        return bool(value) if kinds.get(name) is _is_flag and value is not None else value

    return {name: plain(name, value) for name, value in config.items()}


def check_adapter_fields(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a field of adapter_config.json of another type than peft's."""
    _check(config, where, _ADAPTER_TYPES, ())


def _check(
    config: Mapping[str, Any], where: str, types: tuple[tuple[str, Test, str], ...], never_null: tuple[str, ...]
) -> None:
    tests = {name: (words, test) for words, test, names in types for name in names.split()}
    for name, value in config.items():
        if name not in tests or value is None and name not in never_null:
            continue
        words, test = tests[name]
        if not test(value):
            raise CheckpointError(f"{where}: {name}: expected {words}, got {json.dumps(value, default=str)}")
