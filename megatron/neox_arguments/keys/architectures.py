"""Keys of Transformer-Engine's layers, and of features that are not built yet or that GPT-NeoX had and that
do not come here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key

_MOE, _MAMBA, _MUP = "mixture of experts", "Mamba", "MuP"
_SAME_LINEARS = "our own linears have the same maths and names on disk"
_RWKV = "RWKV is not here; GPT-NeoX commit ea7aefd8 has it"
_GMLP = "gMLP and aMLP are not here; GPT-NeoX commit ea7aefd8 has them"


@dataclass(frozen=True)
class TransformerEngineKeys:
    """Transformer-Engine's layers, under its names on disk."""

    te_backend: Literal["auto", "native", "transformer_engine"] = new_key(
        "auto",
        "Whose kernels compute FP8 products and norms; native: torch's; transformer_engine: that package's, not in "
        "compiled blocks; auto: its products for precision_fp8: te where it works, else native. The layers, and their "
        "names on disk with te_mha and te_layernorm_mlp, are our own with either",
    )
    te_mha: bool = key(False, "Transformer-Engine's attention")
    te_layernorm_mlp: bool = key(False, "Transformer-Engine's MLP, which holds the norm before it")
    te_columnparallel: bool = key(False, "Transformer-Engine's column-parallel linears", no_effect=_SAME_LINEARS)
    te_rowparallel: bool = key(False, "Transformer-Engine's row-parallel linears", no_effect=_SAME_LINEARS)


@dataclass(frozen=True)
class MoEKeys:
    """Mixture of experts."""

    moe_num_experts: int = key(1, "Experts of an MLP", later=_MOE, ge=1)
    moe_expert_interval: int = key(1, "Every this many blocks have experts", later=_MOE, ge=1)
    moe_top_k: int = key(1, "Experts a token goes to", later=_MOE, ge=1)
    moe_router_type: Literal["sinkhorn", "topk"] = key("sinkhorn", "How tokens find experts", later=_MOE)
    moe_lbl_in_fp32: bool = key(False, "Load-balancing loss in fp32", later=_MOE)
    moe_jitter_eps: float | None = key(None, "Noise on the router's input", later=_MOE)


@dataclass(frozen=True)
class OtherArchitectureKeys:
    """Mamba, RWKV, gMLP and soft prompts."""

    mamba_selective_scan_fusion: bool = key(False, "Fused scan", later=_MAMBA)
    mamba_causal_conv_fusion: bool = key(False, "Fused convolution", later=_MAMBA)
    mamba_inner_func_fusion: bool = key(False, "Fused mixer", later=_MAMBA)
    mamba_selective_fp32_params: bool = key(True, "A and D in fp32", later=_MAMBA)
    mamba_use_bias_in_conv: bool = key(True, "Bias of the convolution", later=_MAMBA)
    mamba_use_bias_in_linears: bool = key(False, "Biases of the projections", later=_MAMBA)
    dim_att: int | None = key(None, "RWKV's attention width", refuse=_RWKV)
    head_size: int | None = key(None, "RWKV's head width", refuse=_RWKV)
    ffn_dim: int | None = key(None, "RWKV's inner width", refuse=_RWKV)
    gmlp_attn_dim: int = key(64, "Width of aMLP's attention", refuse=_GMLP)
    soft_prompt_tuning: Mapping[str, Any] | None = key(None, "Trained prompt vectors", later="soft prompt tuning")


@dataclass(frozen=True)
class MuPKeys:
    """Maximal update parametrisation."""

    use_mup: bool = key(False, "Maximal update parametrisation", later=_MUP)
    coord_check: bool = key(False, "Plot coordinate sizes over widths and end", later=_MUP)
    save_base_shapes: bool = key(False, "Write base_shapes_file and end", later=_MUP)
    base_shapes_file: str | None = key(None, "Shapes of the base model", later=_MUP)
    mup_init_scale: float = key(1.0, "Multiplies initial weights", later=_MUP)
    mup_attn_temp: float = key(1.0, "Multiplies attention logits", later=_MUP)
    mup_output_temp: float = key(1.0, "Multiplies output logits", later=_MUP)
    mup_embedding_mult: float = key(1.0, "Multiplies embeddings", later=_MUP)
    mup_rp_embedding_mult: float = key(1.0, "Multiplies relative positions", later=_MUP)
    mup_width_scale: int = key(2, "Width of the delta model over the base model's", later=_MUP)
