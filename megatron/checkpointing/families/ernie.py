"""Describes ERNIE 4.5, dense and with experts: LLaMA's blocks, whose rotary positions are interleaved."""

from typing import Any

from megatron.checkpointing.families.config_fields import drop_fields, get, refuse_unless
from megatron.checkpointing.families.experts import DEEPSEEK_ROWS, EXPERTS_IN_MEMORY, expert_config, expert_keys
from megatron.checkpointing.families.family import Config, Family, TensorMapping, Transform
from megatron.checkpointing.families.llama import ROWS, llama_config, llama_keys, replaced_rows
from megatron.checkpointing.families.mamba import with_defaults
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 1024, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 3072, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def _keys(config: Config) -> dict[str, Any]:
    biases = get(config, "use_bias", False)
    config = {**config, "attention_bias": biases, "mlp_bias": biases}
    return {**llama_keys(config, _DEFAULTS, theta=500000.0), "rotary_interleaved": True}


def _config(args: ModelArgs) -> dict[str, Any]:
    return {**drop_fields(llama_config(args), "attention_bias"), "use_bias": args.use_bias_in_mlp}


ERNIE4_5 = Family(
    "ernie4_5", "Ernie4_5ForCausalLM", ROWS, _keys, _config, title="ERNIE 4.5", has_scorer=False,
    notes="config.json sets: biases",
)  # fmt: skip

_MOE = {
    "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_BIAS = "moe_statics.e_score_correction_bias"  # [1, experts]
_STORED, _IN_MEMORY = f"model.layers.{{}}.mlp.{_BIAS}", f"model.layers.{{}}.mlp.gate.{_BIAS}"
_ONE_ROW = Transform(lambda parts, mixer: parts[0].flatten(), lambda value, mixer: (value.unsqueeze(0),))


def _moe_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _MOE)
    refuse_unless(config, "use_bias", False)  # the head would have a bias too
    refuse_unless(config, "moe_norm_min", 1e-12)
    # transformers' balancing loss counts choices without their biases.
    refuse_unless(config, "output_router_logits", False)
    layers = config["num_hidden_layers"]
    start, end, interval = (config[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval"))
    end = layers - 1 if end == -1 else end
    with_experts = [int((i + 1) % interval == 0 and start <= i <= end) for i in range(layers)]
    fields = {"num_experts": config["moe_num_experts"], "num_experts_per_tok": config["moe_k"], "norm_topk_prob": True}
    shared, width = config["moe_num_shared_experts"], config["moe_intermediate_size"]
    return {
        **llama_keys({**config, "attention_bias": False, "mlp_bias": False}, config, theta=500000.0),
        "rotary_interleaved": True,
        **expert_keys({**config, **fields}, config),
        "moe_router_bias_update_rate": 0.0,  # the biases exist and stay constant
        "moe_intermediate_size": width,
        **({"moe_shared_expert_intermediate_size": shared * width} if shared else {}),
        **({} if all(with_experts) else {"moe_layer_freq": with_experts}),
    }


def _moe_config(args: ModelArgs) -> dict[str, Any]:
    experts = expert_config(args)
    places = [block for block in range(args.num_layers) if args.has_experts(block)] or [args.num_layers]
    # Blocks with experts follow each other at equal distances, or the comparison refuses them.
    interval = places[1] - places[0] if len(places) > 1 else 1
    return {
        **drop_fields(llama_config(args, head_dim=False), "attention_bias"),
        **drop_fields(experts, "num_experts", "num_experts_per_tok", "norm_topk_prob"),
        "moe_num_experts": args.moe_num_experts,
        "moe_k": args.moe_top_k,
        "moe_intermediate_size": args.expert_ffn_size,
        "moe_num_shared_experts": (args.moe_shared_expert_intermediate_size or 0) // args.expert_ffn_size,
        "moe_layer_start_index": places[0],
        "moe_layer_end_index": places[-1],
        "moe_layer_interval": interval,
        "use_bias": False,
    }


ERNIE4_5_MOE = Family(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
    replaced_rows(*DEEPSEEK_ROWS, TensorMapping("mlp.router.expert_bias", (_STORED,), _ONE_ROW)),
    _moe_keys, _moe_config, title="ERNIE 4.5 MoE", in_memory={**EXPERTS_IN_MEMORY, _IN_MEMORY: (_STORED,)},
    carried=r"model\.mtp_.*", has_scorer=False,
    notes="config.json sets: dense blocks; multi-token prediction layers (mtp) are kept, not trained; fp32 routers "
    "beside 16-bit weights need --precision",
)  # fmt: skip
