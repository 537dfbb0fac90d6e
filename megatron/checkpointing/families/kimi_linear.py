"""Describes the family Kimi Linear: Kimi Delta Attention, latent attention in some blocks, experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import FULL, get, refuse_unless
from megatron.checkpointing.families.deepseek import (
    DENSE,
    LATENT_ROWS,
    SPARSE,
    first_dense,
    grouped_expert_config,
    grouped_expert_keys,
    latent_config,
    latent_keys,
    sigmoid_keys,
    with_defaults,
)
from megatron.checkpointing.families.experts import deepseek_rows, experts_in_memory
from megatron.checkpointing.families.family import UP_GATE, Config, Family, TensorMapping, Transform
from megatron.checkpointing.families.llama import replaced_rows
from megatron.checkpointing.families.qwen3_next import LINEAR
from megatron.model.specs import KimiDeltaAttentionSpec, MixerSpec
from megatron.neox_arguments import ModelArgs

_BLOCK = "model.layers.{}."
_NET, _EXPERTS = _BLOCK + "self_attn.", _BLOCK + "block_sparse_moe."
_KINDS = {LINEAR: "kimi_delta_attention", FULL: "global"}
_DEFAULTS = {
    "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32, "intermediate_size": 9216,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1024, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "first_k_dense_replace": 1, "linear_num_heads": 32,
    "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
# The family's names of fields that DeepSeek's families and transformers call otherwise.
_NAMES = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}  # fmt: skip
# Fields of the published models' linear_attn_config.
_PUBLISHED = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads",
              "linear_conv_kernel_dim": "short_conv_kernel_size"}  # fmt: skip


def _split(fused: Tensor, net: MixerSpec | None) -> tuple[Tensor, ...]:
    assert isinstance(net, KimiDeltaAttentionSpec)
    sizes = (net.keys, net.keys, net.values, net.heads)
    return fused.split(sizes[:3] if len(fused) == sum(sizes[:3]) else sizes)


def _join(parts: Sequence[Tensor], net: MixerSpec | None) -> Tensor:
    return torch.cat(list(parts))


# Tensors of queries, keys, values (and rates) below each other. A_log has dimensions of size 1 around its
# heads.
_STACKED = Transform(_join, _split)
_PER_HEAD = Transform(lambda parts, net: parts[0].flatten(), lambda value, net: (value.view(1, 1, -1, 1),))
_QKV = tuple(f"{_NET}{name}_proj.weight" for name in "qkv")
_CONVOLUTIONS = tuple(f"{_NET}{name}_conv1d.weight" for name in "qkv")
_LOW_RANK = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
_MATRICES = ("w1", "w3", "w2")
_DENSE = ("up_proj", "gate_proj", "down_proj")
_ROWS = replaced_rows(
    *LATENT_ROWS,
    *deepseek_rows(_EXPERTS, *_MATRICES),
    TensorMapping("mlp.linear1.weight", tuple(f"{_EXPERTS}{name}.weight" for name in _DENSE[:2]), UP_GATE),
    TensorMapping("mlp.linear2.weight", (f"{_EXPERTS}{_DENSE[2]}.weight",)),
    TensorMapping("mixer.in_proj.weight", (*_QKV, _NET + "b_proj.weight"), _STACKED),
    TensorMapping("mixer.conv1d.weight", _CONVOLUTIONS, _STACKED),
    *(TensorMapping(f"mixer.{name}.weight", (f"{_NET}{name}.weight",)) for name in _LOW_RANK),
    TensorMapping("mixer.dt_bias", (_NET + "dt_bias",)),
    TensorMapping("mixer.A_log", (_NET + "A_log",), _PER_HEAD),
    TensorMapping("mixer.norm.weight", (_NET + "o_norm.weight",)),
    TensorMapping("mixer.out_proj.weight", (_NET + "o_proj.weight",)),
)
_GATE = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")
_SHARED = tuple(f"shared_experts.{name}.weight" for name in _DENSE)
_IN_MEMORY = {
    **experts_in_memory(_EXPERTS, *_MATRICES),
    # Published files name a dense MLP's tensors so too.
    **{
        f"{_BLOCK}mlp.{name}": (_EXPERTS + name,)
        for name in (*(f"{n}.weight" for n in _DENSE), *_SHARED, "gate.weight", "gate.e_score_correction_bias")
    },
    _NET + "conv1d.weight": _CONVOLUTIONS,
    **{f"{_NET}forget_gate.{name}": (_NET + name,) for name in _GATE},
}


def _in_one_naming(config: Config) -> dict[str, Any]:
    """Returns config.json with DeepSeek's names of fields, and with the fields of linear_attn_config."""
    published = config.get("linear_attn_config") or {}
    renamed = {name: config[field] for name, field in _NAMES.items() if field in config}
    sizes = {name: published[field] for name, field in _PUBLISHED.items() if field in published}
    return with_defaults({**config, **renamed, **sizes}, _DEFAULTS)


def kimi_block_kinds(config: Config) -> list[str]:
    """Returns the NeoX name of each block's kind. Raises CheckpointError for an unsupported kind.

    Published models count blocks from 1."""
    published, number = config.get("linear_attn_config") or {}, config["num_hidden_layers"]
    kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(number)]
    if "full_attn_layers" in published and "kda_layers" in published:
        full = set(published["full_attn_layers"])
        kinds = [FULL if i + 1 in full else LINEAR for i in range(number)]
        if {*range(1, number + 1)} - full != {*published["kda_layers"]}:
            raise CheckpointError(
                "config.json: linear_attn_config: full_attn_layers and kda_layers must name each block once, from 1 to "
                f"{number}"
            )
    kinds = get(config, "layer_types", kinds)
    unknown = sorted({*kinds} - _KINDS.keys())
    if unknown:
        raise CheckpointError(f"config.json: layer_types: {', '.join(unknown)} is not supported, only {LINEAR}, {FULL}")
    return [_KINDS[kind] for kind in kinds]


def _keys(config: Config) -> dict[str, Any]:
    config = _in_one_naming(config)
    refuse_unless(config, "tie_word_embeddings", False)  # transformers has two weights either way
    refuse_unless(config, "mla_use_nope", True)  # transformers rotates nothing, whatever the field says
    refuse_unless(config, "moe_router_activation_func", "sigmoid")
    refuse_unless(config, "moe_layer_freq", 1)
    blocks = kimi_block_kinds(config)
    heads, width, kernel = (config[f"linear_{name}"] for name in ("num_heads", "head_dim", "conv_kernel_dim"))
    sizes = {
        "linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_key_head_dim": width,
        "linear_value_head_dim": width, "linear_conv_kernel_dim": kernel,
    }  # fmt: skip
    return {
        **latent_keys({**config, "mlp_bias": False}, interleaved=None),
        "attention_config": blocks,
        **grouped_expert_keys(config, get(config, "mlp_layer_types", first_dense(config))),
        **sigmoid_keys(config),
        **(sizes if _KINDS[LINEAR] in blocks else {}),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    names = {kind: name for name, kind in _KINDS.items()} | {"flash": FULL}
    unsupported = sorted({*args.attention_config} - names.keys())
    if unsupported:
        raise CheckpointError(
            f"the family kimi_linear has no blocks of kind {', '.join(unsupported)} (attention_config)"
        )
    fields = {
        **latent_config(args),
        **grouped_expert_config(args),
        "norm_topk_prob": args.norm_topk_prob,
        "mlp_layer_types": [SPARSE if args.has_experts(block) else DENSE for block in range(args.num_layers)],
        "layer_types": [names[kind] for kind in args.attention_config],
        "linear_num_heads": args.linear_num_value_heads,
        "linear_head_dim": args.linear_value_head_dim,
        "linear_conv_kernel_dim": args.linear_conv_kernel_dim,
    }
    return {_NAMES.get(name, name): value for name, value in fields.items()}


KIMI_LINEAR = Family(
    "kimi_linear", "KimiLinearForCausalLM", _ROWS, _keys, _config, title="Kimi Linear", in_memory=_IN_MEMORY,
    has_scorer=False, notes="config.json sets: kinds of blocks, dense blocks, expert groups",
)  # fmt: skip
