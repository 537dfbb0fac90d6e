"""Describes EXAONE 4 and K-EXAONE, whose layers have a window, or else no positions.

EXAONE 4 has norms after attention and MLP. K-EXAONE has norms before them, and DeepSeek V3's experts.
"""

from collections.abc import Sequence
from typing import Any

from megatron.checkpointing.families.config_fields import (
    SLIDING,
    drop_fields,
    get,
    layer_kinds,
    layer_types,
    needed_window,
    window_keys,
    window_of,
    window_period,
)
from megatron.checkpointing.families.deepseek import (
    DENSE,
    SPARSE,
    first_dense,
    grouped_expert_config,
    grouped_expert_keys,
    sigmoid_keys,
    with_defaults,
)
from megatron.checkpointing.families.experts import DEEPSEEK_ROWS, EXPERTS_IN_MEMORY
from megatron.checkpointing.families.family import Config, Family, TensorMapping
from megatron.checkpointing.families.llama import PER_HEAD, ROWS, llama_config, llama_keys, replaced_rows
from megatron.neox_arguments import ModelArgs

_EXAONE4 = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 16384, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip


def _kinds(config: Config) -> Sequence[str]:
    """Returns the kind of each layer's attention."""
    if config.get("sliding_window", 4096) is None:
        return layer_kinds(config, lambda i: False)
    period = window_period(config, 4)
    return layer_kinds(config, lambda i: (i + 1) % period != 0)


def _attention_keys(config: Config, defaults: Config) -> dict[str, Any]:
    """Returns the NeoX configuration keys for EXAONE's attention; layers without a window have no positions.

    defaults: the family's values for fields that config.json leaves out."""
    config = {**defaults, **config, "attention_bias": False, "mlp_bias": False}
    kinds = _kinds(config)
    window = needed_window(config, 4096, kinds)
    return {
        **llama_keys(config, defaults),
        **PER_HEAD,
        **window_keys(window, kinds),
        **({} if window is None else {"no_rope_layers": [int(kind == SLIDING) for kind in kinds]}),
    }


def _attention_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for EXAONE's attention, the inverse of `_attention_keys`."""
    return {
        **drop_fields(llama_config(args), "attention_bias"),
        "sliding_window": window_of(args),
        "layer_types": layer_types(args),
    }


def _keys(config: Config) -> dict[str, Any]:
    return {**_attention_keys(config, _EXAONE4), "norm_placement": "olmo3"}


EXAONE4 = Family(
    "exaone4", "Exaone4ForCausalLM", ROWS, _keys, _attention_config, title="EXAONE 4",
    notes="config.json sets: sliding windows; with them, layers without a window have no positions",
)  # fmt: skip

_EXAONE_MOE = {
    **_EXAONE4, "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def _moe_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _EXAONE_MOE)
    counts = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    return {
        **_attention_keys(config, config),
        **grouped_expert_keys({**config, **counts}, get(config, "mlp_layer_types", first_dense(config))),
        **sigmoid_keys(config),
    }


def _moe_config(args: ModelArgs) -> dict[str, Any]:
    experts, attention = grouped_expert_config(args), _attention_config(args)
    return {
        **attention,
        "sliding_window": attention["sliding_window"] or 4096,  # the field must not be null
        **drop_fields(experts, "n_routed_experts", "n_shared_experts"),
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": experts["n_shared_experts"],
        "mlp_layer_types": [SPARSE if args.has_experts(block) else DENSE for block in range(args.num_layers)],
        "norm_topk_prob": args.norm_topk_prob,
    }


_BIAS = "e_score_correction_bias"
_STORED, _IN_MEMORY = f"model.layers.{{}}.mlp.{_BIAS}", f"model.layers.{{}}.mlp.gate.{_BIAS}"
EXAONE_MOE = Family(
    "exaone_moe", "ExaoneMoeForCausalLM",
    replaced_rows(*DEEPSEEK_ROWS, TensorMapping("mlp.router.expert_bias", (_STORED,))),
    _moe_keys, _moe_config, title="K-EXAONE", in_memory={**EXPERTS_IN_MEMORY, _IN_MEMORY: (_STORED,)},
    carried=r"mtp\..*", has_scorer=False,
    notes="config.json sets: dense blocks, windows; multi-token prediction layers (mtp) are kept, not trained",
)  # fmt: skip
