"""Describes the dense text models of Gemma 4: 31B (gemma4_text) and 12B (gemma4_unified_text).

Layers without a window have wider heads, fewer key-value heads, and values that are keys. Values have norms,
and each block's output is multiplied by a number.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    FULL,
    SLIDING,
    drop_fields,
    gated_activation,
    get,
    layer_kinds,
    number,
    refuse_unless,
    rope_of,
    window_config,
    window_keys,
)
from megatron.checkpointing.families.family import Config, Family, TensorMapping
from megatron.checkpointing.families.llama import PER_HEAD, common_config, common_keys, replaced_rows
from megatron.checkpointing.families.olmo import local_rope_keys
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.frozen import as_tuple

ROWS = replaced_rows(TensorMapping("layer_scalar", ("model.layers.{}.layer_scalar",)))
_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_DEFAULTS = {
    "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "intermediate_size": 9216, "max_position_embeddings": 131072, "sliding_window": 512, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "global_head_dim": 512,
    "rope_parameters": _ROPES,
}  # fmt: skip
_UNIFIED = {
    **_DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
}  # fmt: skip


def _keys(config: Config, defaults: Config) -> dict[str, Any]:
    config = {**defaults, **config}
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        refuse_unless(config, name, 0)
    refuse_unless(config, "enable_moe_block", False)
    refuse_unless(config, "rope_scaling", None)
    refuse_unless(config, "use_bidirectional_attention", "vision")  # causal in texts
    kinds = [*layer_kinds(config, lambda i: (i + 1) % 6 != 0)]
    if kinds:
        kinds[-1] = FULL  # as transformers does
    keys = {
        **common_keys({**config, "mlp_bias": False}, defaults, "hidden_activation"),
        **PER_HEAD,
        **window_keys(config["sliding_window"], kinds),
        **_rope_keys(config, kinds),
        "norm_placement": "sandwich",
        "attention_multiplier": 1.0,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "embedding_multiplier": config["hidden_size"] ** 0.5,
        "attention_k_eq_v": get(config, "attention_k_eq_v", False),
        "use_v_norm": True,
        "layer_scalar": True,
    }
    return {**keys, **_head_keys(config, kinds)}


def _rope_keys(config: Config, kinds: list[str]) -> dict[str, Any]:
    ropes = get(config, "rope_parameters", _ROPES)
    for kind in kinds:
        if get(get(ropes, kind, {}), "rope_theta", None) is None:
            raise CheckpointError(f"config.json: rope_parameters.{kind}.rope_theta is missing; Gemma 4 needs it")
    rope = rope_of({"rope_parameters": ropes}, FULL, theta=1000000.0)
    keys: dict[str, Any] = {"rotary_emb_base": number(rope["rope_theta"])}
    if rope["rope_type"] == "proportional":
        share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor")
        keys["rope_scaling"] = {"rope_type": "proportional", "partial_rotary_factor": share, "factor": factor}
    elif rope["rope_type"] != "default":
        kind = rope["rope_type"]
        raise CheckpointError(
            f"config.json: rope_parameters.{FULL}.rope_type: {kind} is not supported in Gemma 4, only proportional"
        )
    if SLIDING in kinds:
        keys |= local_rope_keys(rope_of({"rope_parameters": ropes}, SLIDING, theta=10000.0))
    return keys


def _head_keys(config: Config, kinds: list[str]) -> dict[str, Any]:
    """Returns the NeoX keys for the sizes of heads, which transformers writes as `per_layer_config`."""
    widths, kv_heads = [config["head_dim"]] * len(kinds), [config["num_key_value_heads"]] * len(kinds)
    if "per_layer_config" not in config:
        shares = config.get("num_global_key_value_heads") if get(config, "attention_k_eq_v", False) else None
        layer = {"head_dim": config["global_head_dim"], **({"num_key_value_heads": shares} if shares else {})}
        layers: Mapping[Any, Mapping[str, Any]] = {i: layer for i, kind in enumerate(kinds) if kind == FULL}
    else:
        layers = config["per_layer_config"] or {}
    for block, sizes in layers.items():
        unsupported = sizes.keys() - {"head_dim", "num_key_value_heads"}
        if unsupported or not 0 <= int(block) < len(kinds):
            raise CheckpointError(f"config.json: per_layer_config.{block}: {', '.join(unsupported) or 'no such layer'}")
        widths[int(block)] = get(sizes, "head_dim", config["head_dim"])
        kv_heads[int(block)] = get(sizes, "num_key_value_heads", config["num_key_value_heads"])
    wide: dict[str, set[int]] = {kind: set() for kind in kinds}
    for kind, width in zip(kinds, widths, strict=True):
        wide[kind].add(width)
        if len(wide[kind]) > 1:
            raise CheckpointError(f"config.json: per_layer_config: head_dim differs between {kind} layers")
    if SLIDING not in wide:
        return {"num_kv_heads": kv_heads, "head_dim": widths[0]}
    return {"num_kv_heads": kv_heads, "head_dim": wide[SLIDING].pop(), "global_head_dim": wide[FULL].pop()}


def _config(args: ModelArgs) -> dict[str, Any]:
    kv_heads = dict(zip(map(args.has_window, range(args.num_layers)), _per_layer(args.kv_heads, args), strict=True))
    local, share = kv_heads.get(True, kv_heads[False] if False in kv_heads else 1), kv_heads.get(False)
    scaling, theta = args.rope_scaling, float(args.rotary_emb_base)
    full: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        full = {"rope_type": scaling["rope_type"], "partial_rotary_factor": scaling["partial_rotary_factor"]}
        full |= {} if scaling["factor"] in (None, 1.0) else {"factor": scaling["factor"]}
    sliding = {"rope_type": "default", "rope_theta": float(args.rope_local_base_freq or theta)}
    return {
        **drop_fields(common_config(replace(args, num_kv_heads=local)), "hidden_act"),
        "hidden_activation": gated_activation(args, "gelu_pytorch_tanh"),
        **window_config(args),
        "rope_parameters": {FULL: {**full, "rope_theta": theta}, SLIDING: sliding},
        "final_logit_softcapping": args.final_logit_softcapping,
        "attention_k_eq_v": args.attention_k_eq_v,
        "num_global_key_value_heads": share if args.attention_k_eq_v else None,
        "global_head_dim": args.global_head_dim or args.head_dim,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
    }


def _per_layer(value: int | tuple[int, ...], args: ModelArgs) -> tuple[int, ...]:
    values = as_tuple(value)
    return values * args.num_layers if len(values) == 1 else values


def _gemma4_keys(config: Config) -> dict[str, Any]:
    return _keys(config, _DEFAULTS)


def _unified_keys(config: Config) -> dict[str, Any]:
    return _keys(config, _UNIFIED)


def _unified_config(args: ModelArgs) -> dict[str, Any]:
    return drop_fields(_config(args), "hidden_size_per_layer_input", "enable_moe_block")


_DENSE_SIZES = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4}
_NOTES = "values of full layers are keys, norms of values, a factor of each block's output (kept, not trained)"
GEMMA4 = Family(
    "gemma4_text", "Gemma4ForCausalLM", ROWS, _gemma4_keys, _config, title="Gemma 4 31B",
    has_scorer=False, typical=_DENSE_SIZES,
    notes=f"{_NOTES}; experts (26B-A4B), embeddings in each layer and shared keys (E2B, E4B) are refused",
)  # fmt: skip
GEMMA4_UNIFIED = Family(
    "gemma4_unified_text", "Gemma4UnifiedForCausalLM", ROWS, _unified_keys, _unified_config, title="Gemma 4 12B",
    has_scorer=False, typical=_DENSE_SIZES, notes=_NOTES,
)  # fmt: skip
