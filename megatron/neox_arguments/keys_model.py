"""Keys that say what the model is, and in which precision it is computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.declare import REQUIRED, key
from megatron.neox_arguments.sections import Bf16, DataTypes, Fp16

Init = Literal[
    "normal", "scaled_normal", "orthogonal", "scaled_orthogonal", "xavier_uniform", "xavier_normal", "wang_init",
    "small_init", "single_residual_scaled_normal",
]  # fmt: skip
Activation = Literal["gelu", "geglu", "relu", "softsign", "swish", "mish", "silu", "reglu", "swiglu", "bilinear", "glu"]
_KERNEL = "selects a kernel in GPT-NeoX; the mathematics is the same"


@dataclass(frozen=True)
class ModelKeys:
    num_layers: int = key(REQUIRED, "Number of transformer blocks", ge=1)
    hidden_size: int = key(REQUIRED, "Width of the residual stream", ge=1)
    num_attention_heads: int = key(REQUIRED, "Number of attention heads", ge=1)
    num_kv_heads: int | None = key(None, "Number of key-value heads (GQA, MQA); unset: num_attention_heads", ge=1)
    seq_length: int = key(REQUIRED, "Tokens of one sample", ge=1)
    max_position_embeddings: int = key(REQUIRED, "Longest sequence the model can read; rows of learned positions", ge=1)
    intermediate_size: int | None = key(None, "Inner width of the MLP, as it is (see compat_ffn_width)", ge=1)
    expansion_factor: float | None = key(
        None, "Inner width in units of hidden_size when intermediate_size is unset; 4", gt=0
    )
    mlp_multiple_of: int = key(1, "An inner width that is not given is rounded up to a multiple of this", ge=1)
    compat_ffn_width: Literal["upstream", "fork"] | None = key(
        None, "Compute the inner width as GPT-NeoX (upstream) or its geodesic fork do from the same keys"
    )
    norm: Literal["layernorm", "rmsnorm"] = key(
        "layernorm",
        "Kind of normalisation",
        later=("non_parametric_layernorm", "scalenorm", "te_rmsnorm", "te_layernorm"),
    )
    layernorm_epsilon: float = key(1e-5, "Added to the variance in layernorm", gt=0)
    rms_norm_epsilon: float = key(1e-8, "Added to the mean square in rmsnorm", gt=0)
    pos_emb: Literal["learned", "rotary", "alibi", "none"] = key(
        "learned", "Kind of position information", later=("sinusoidal", "rpe")
    )
    rotary_pct: float = key(1.0, "Share of each head's dimensions that is rotated", gt=0, le=1)
    rotary_emb_base: int | float = key(10000, "Base of the rotary frequencies", gt=0)
    no_weight_tying: bool = key(False, "Give the output layer its own weights instead of the embedding's")
    attention_config: tuple[Any, ...] = key(
        None, "Kind of attention of each layer, as in [[[flash], 12]]; global and flash are the same mathematics"
    )
    attention_backend: Literal["auto", "math", "flash", "efficient", "cudnn"] = key(
        "auto", "Kernel of attention; auto takes the first that works here of cudnn, flash, efficient and math"
    )
    make_vocab_size_divisible_by: int = key(
        128, "The vocabulary is padded to a multiple of this x model_parallel_size", ge=1
    )
    padded_vocab_size: int = key(None, "Rows of the embedding; unset: made from the tokenizer", ge=1)
    activation: Activation = key("gelu", "Activation of the MLP; geglu, reglu, swiglu, bilinear and glu are gated")
    bias_gelu_fusion: bool = key(False, "Use the tanh approximation of gelu, as the fused kernel of GPT-NeoX does")
    init_method: Init = key("normal", "Initialisation of embeddings and of linears that read the residual stream")
    output_layer_init_method: Init = key("scaled_normal", "Initialisation of linears that write to the residual stream")
    init_method_std: float = key(0.02, "Standard deviation of the normal initialisations", ge=0)
    gpt_j_residual: bool = key(False, "Attention and MLP side by side: x + attn(ln1(x)) + mlp(ln2(x))")
    use_bias_in_attn_linear: bool = key(True, "Biases in the attention's linears")
    use_bias_in_mlp: bool = key(True, "Biases in the MLP's linears")
    use_bias_in_norms: bool = key(
        True, "Biases in layernorm", no_effect="GPT-NeoX never reads it; layernorm has a bias"
    )
    attention_dropout: float = key(0.0, "Dropout of attention probabilities", ge=0, lt=1)
    hidden_dropout: float = key(0.0, "Dropout of what a block adds to the residual stream", ge=0, lt=1)
    output_layer_parallelism: Literal["column"] = key("column", "How the output layer is split")
    compile: Literal[False, "block"] = key(False, "Compile each transformer block with torch.compile")
    scaled_upper_triang_masked_softmax_fusion: bool = key(False, "Fused causal softmax", no_effect=_KERNEL)
    scaled_masked_softmax_fusion: bool = key(False, "Fused masked softmax", no_effect=_KERNEL)
    rope_fusion: bool = key(False, "Fused rotary embedding", no_effect=_KERNEL)
    layernorm_fusion: bool = key(False, "Fused layernorm", no_effect=_KERNEL)
    rmsnorm_fusion: bool = key(False, "Fused rmsnorm", no_effect=_KERNEL)
    bias_dropout_fusion: bool = key(False, "Fused bias and dropout", no_effect=_KERNEL)


@dataclass(frozen=True)
class PrecisionKeys:
    precision: Literal["fp32", "fp16", "bfloat16"] = key(
        None, "Type of weights and activations; unset: by fp16, bf16, else fp32"
    )
    fp16: Mapping[str, Any] | None = key(None, "fp16 and its loss scaling", section=Fp16)
    bf16: Mapping[str, Any] | None = key(None, "bf16", section=Bf16)
    data_types: Mapping[str, Any] | None = key(None, "DeepSpeed's data types", section=DataTypes)
