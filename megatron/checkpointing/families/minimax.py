"""Describes MiniMax M2: experts with sigmoid scores, partly rotated heads, norms over all queries or keys."""

from typing import Any

from megatron.checkpointing.families.config_fields import drop_fields, refuse_unless, rope_keys, rope_of
from megatron.checkpointing.families.deepseek import with_defaults
from megatron.checkpointing.families.experts import MIXTRAL_IN_MEMORY, MIXTRAL_ROWS, expert_config, expert_keys
from megatron.checkpointing.families.family import Config, Family, TensorMapping
from megatron.checkpointing.families.llama import common_keys, llama_config
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 1536, "max_position_embeddings": 196608, "num_experts_per_tok": 8, "num_local_experts": 256,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_BIAS = "e_score_correction_bias"
_STORED, _IN_MEMORY = f"model.layers.{{}}.block_sparse_moe.{_BIAS}", f"model.layers.{{}}.mlp.{_BIAS}"


def _keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _DEFAULTS)
    # transformers computes these values, whatever the fields are; its balancing loss has softmax scores.
    for name, value in (("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True),
                        ("qk_norm_type", "per_layer"), ("output_router_logits", False)):  # fmt: skip
        refuse_unless(config, name, value)
    refuse_unless(config, "router_jitter_noise", 0, 0.0)
    if config.get("rotary_dim") is not None:
        config = {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"], **config}
    return {
        **common_keys({**config, "attention_bias": False, "mlp_bias": False}, config),
        **rope_keys(config, rope_of(config, theta=5000000.0), partial=True),
        **expert_keys(config, config),
        "norm_topk_prob": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 0.0,  # the biases exist and stay constant
        "use_qk_layernorm": True,
        "use_separate_qk_norms": True,
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(llama_config(args, partial=True), "attention_bias"),
        **drop_fields(expert_config(args, "num_local_experts"), "norm_topk_prob"),
        "intermediate_size": args.expert_ffn_size,
        "rotary_dim": args.rotary_width // 2 * 2,
    }


MINIMAX_M2 = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM",
    (*MIXTRAL_ROWS, TensorMapping("mlp.router.expert_bias", (_STORED,))), _keys, _config, title="MiniMax M2",
    in_memory={**MIXTRAL_IN_MEMORY, _IN_MEMORY: (_STORED,)}, has_scorer=False,
)  # fmt: skip
