"""Describes the family of Phi 3 and 4: LLaMA's blocks, fused projections, LongRoPE, partly rotated heads."""

from typing import Any

from megatron.checkpointing.families.config_fields import drop_fields, rope_keys, rope_of, window_of
from megatron.checkpointing.families.family import FUSED_QKV, GATE_UP, Config, Family, TensorMapping
from megatron.checkpointing.families.llama import llama_config, replaced_rows
from megatron.checkpointing.families.mistral import same_windows
from megatron.model.positions import longrope_factor
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROWS = replaced_rows(
    TensorMapping("attention.query_key_value.weight", ("model.layers.{}.self_attn.qkv_proj.weight",), FUSED_QKV),
    TensorMapping("mlp.linear1.weight", ("model.layers.{}.mlp.gate_up_proj.weight",), GATE_UP),
)
_ORIGINAL = "original_max_position_embeddings"


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config}
    rope = rope_of(config, theta=10000.0)
    if rope["rope_type"] == "yarn":  # transformers also reads yarn in Phi 3's files as longrope
        rope["rope_type"] = "longrope"
    config.setdefault(_ORIGINAL, 4096)
    windows = same_windows(config, _DEFAULTS, config.get("sliding_window"))
    return {**windows, **rope_keys(config, rope, partial=True)}


def _config(args: ModelArgs) -> dict[str, Any]:
    config = drop_fields(llama_config(args, head_dim=False, partial=True), "attention_bias")
    config["sliding_window"] = window_of(args)
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") != "longrope":
        return {**config, _ORIGINAL: args.max_position_embeddings}
    original = scaling.pop(_ORIGINAL)
    scaling["type"] = scaling.pop("rope_type")  # versions before transformers 5 read only this name
    if scaling.get("attention_factor") == longrope_factor(original, args.max_position_embeddings):
        del scaling["attention_factor"]  # they do not read this field
    return {**config, _ORIGINAL: original}


PHI3 = Family(
    "phi3", "Phi3ForCausalLM", ROWS, _keys, _config, title="Phi 3, 3.5, 4",
    notes="fused projections; config.json sets: sliding windows, partial rotary, tied head. LongRoPE: transformers "
    "takes the long factors for a whole batch if its longest text is long; here each text has its own",
)  # fmt: skip
