"""Describes Granite 3, dense and with experts: LLaMA's blocks with four factors.

The factors scale embeddings, attention logits, the outputs of attention and MLP, and logits.
"""

from typing import Any

from megatron.checkpointing.families.config_fields import drop_fields, get, number
from megatron.checkpointing.families.experts import expert_config, expert_keys
from megatron.checkpointing.families.family import GATE_UP, Config, Family, TensorMapping
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, ROWS, llama_config, llama_keys, replaced_rows
from megatron.model.build_specs import attention_scale
from megatron.neox_arguments import ModelArgs


def _keys(config: Config) -> dict[str, Any]:
    factors = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
    return {
        **llama_keys(config, LLAMA_DEFAULTS),
        **{name: get(config, name, 1.0) for name in factors},
        "logit_scale": 1 / get(config, "logits_scaling", 1.0),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args),
        "mlp_bias": args.use_bias_in_mlp,
        "attention_multiplier": attention_scale(args) or args.head_dim**-0.5,
        "embedding_multiplier": args.embedding_multiplier,
        "residual_multiplier": args.residual_multiplier,
        "logits_scaling": number(float(f"{1 / args.logit_scale:.12g}")),  # 1 / (1 / 49) is not 49
    }


GRANITE = Family(
    "granite", "GraniteForCausalLM", ROWS, _keys, _config, title="Granite 3", has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)  # fmt: skip

_MOE = {
    **LLAMA_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
    "shared_intermediate_size": 0,
}  # fmt: skip
_BLOCK = "model.layers.{}."
_SPARSE = _BLOCK + "block_sparse_moe."
_INPUTS, _OUTPUT, _ROUTER = (f"{_SPARSE}{name}.weight" for name in ("input_linear", "output_linear", "router.layer"))
_MOE_ROWS = replaced_rows(
    TensorMapping("mlp.router.layer.weight", (_ROUTER,)),
    # One tensor holds the gates of all experts and then their up projections: [experts, 2 * width, hidden].
    TensorMapping("mlp.experts.mlp.w1", (_INPUTS,), stacked=True, part=(0, 2), consecutive=True),
    TensorMapping("mlp.experts.mlp.w3", (_INPUTS,), stacked=True, part=(1, 2), consecutive=True),
    TensorMapping("mlp.experts.mlp.w2", (_OUTPUT,), stacked=True, transposed=True),
)
_SHARED_ROWS = (
    TensorMapping("mlp.shared_expert.linear1.weight", (_BLOCK + "shared_mlp.input_linear.weight",), GATE_UP),
    TensorMapping("mlp.shared_expert.linear2.weight", (_BLOCK + "shared_mlp.output_linear.weight",)),
)
_IN_MEMORY = {
    f"{_SPARSE}experts.gate_up_proj": (_INPUTS,),
    f"{_SPARSE}experts.down_proj": (_OUTPUT,),
    f"{_SPARSE}router.weight": (_ROUTER,),
}


def _moe_keys(config: Config) -> dict[str, Any]:
    config = {**_MOE, **config}
    width = get(config, "shared_intermediate_size", 0)
    return {
        **_keys({**config, "mlp_bias": False}),
        **expert_keys({**config, "norm_topk_prob": True}, _MOE),
        **({"moe_shared_expert_intermediate_size": width} if width else {}),
    }


def _moe_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(_config(args), "mlp_bias"),
        **drop_fields(expert_config(args, "num_local_experts"), "norm_topk_prob"),
        "intermediate_size": args.expert_ffn_size,
    }


def _unshared_keys(config: Config) -> dict[str, Any]:
    return _moe_keys({**config, "shared_intermediate_size": 0})


GRANITE_MOE = Family(
    "granitemoe", "GraniteMoeForCausalLM", _MOE_ROWS, _unshared_keys, _moe_config, title="Granite 3 MoE",
    in_memory=_IN_MEMORY, has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)  # fmt: skip


def _shared_config(args: ModelArgs) -> dict[str, Any]:
    return {**_moe_config(args), "shared_intermediate_size": args.moe_shared_expert_intermediate_size or 0}


GRANITE_MOE_SHARED = Family(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", (*_MOE_ROWS, *_SHARED_ROWS), _moe_keys, _shared_config,
    title="Granite 3 MoE with a shared expert", in_memory=_IN_MEMORY, has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)  # fmt: skip
