"""Declares the keys of the model's shape and of its precision."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.attention import AttentionBackendName
from megatron.neox_arguments.keys.declaration import REQUIRED, key, new_key
from megatron.neox_arguments.keys.sections import Bf16, DataTypes, Fp16, RopeScaling

Init = Literal[
    "normal", "scaled_normal", "orthogonal", "scaled_orthogonal", "xavier_uniform", "xavier_normal", "wang_init",
    "small_init", "single_residual_scaled_normal",
]  # fmt: skip
Activation = Literal[
    "gelu", "geglu", "geglu_tanh", "relu", "relu2", "softsign", "swish", "mish", "silu", "xielu", "reglu", "swiglu",
    "swigluoai", "bilinear", "glu",
]  # fmt: skip
DROPOUT_KEYS = ("hidden_dropout", "attention_dropout")
_KERNEL = "selects a kernel in GPT-NeoX; the mathematics is the same"
_NORM_KERNEL = f"{_KERNEL}; apex: true takes apex's fused norms"


@dataclass(frozen=True)
class ModelKeys:
    """Configuration keys of the model's shape: layers, heads, positions, norms, activations,
    initialisation."""

    num_layers: int = key(REQUIRED, "Number of transformer blocks", ge=1, le=10_000)
    hidden_size: int = key(REQUIRED, "Width of the residual stream", ge=1)
    num_attention_heads: int = key(REQUIRED, "Number of attention heads", ge=1)
    num_kv_heads: int | tuple[int, ...] | None = key(
        None,
        "Key-value heads (GQA, MQA); a list: one per layer, repeated if shorter; unset: num_attention_heads. "
        "More tensor ranks than heads share them",
        ge=1,
    )
    compat_gqa_rows: Literal["pre1315", "post1315"] | None = new_key(
        None,
        "Row order of queries, keys and values in GPT-NeoX's checkpoints with num_kv_heads: before or since its "
        "#1315 (November 2024). Unset: post1315, but pre1315 under names from before mid-2024. Own checkpoints "
        "record it",
    )
    head_dim: int = new_key(None, "Width of a head; unset: hidden_size / num_attention_heads", ge=1)
    global_head_dim: int | None = new_key(
        None, "Width of a head in full_attention layers of layer_types, as in Gemma 4; unset: head_dim", ge=1
    )
    seq_length: int = key(REQUIRED, "Tokens of one sample", ge=1)
    max_position_embeddings: int = key(REQUIRED, "Longest sequence of the model; rows of learned positions", ge=1)
    intermediate_size: int | tuple[int, ...] | None = key(
        None,
        "Inner width of the MLP, used as written; a list: one per layer, repeated if shorter",
        ge=1,
        differs="GPT-NeoX takes 2/3 of it for gated activations: compat_ffn_width",
    )
    expansion_factor: float | None = key(
        None, "Inner width in units of hidden_size when intermediate_size is unset; 4", gt=0
    )
    mlp_multiple_of: int = key(1, "Round an unset inner width up to a multiple of this", ge=1)
    compat_ffn_width: Literal["none", "upstream", "fork"] | None = new_key(
        None, "Meaning of intermediate_size: the width as written (none), GPT-NeoX's (upstream) or its geodesic fork's"
    )
    norm: Literal["layernorm", "rmsnorm", "non_parametric_layernorm", "scalenorm", "te_rmsnorm", "te_layernorm"] = key(
        "layernorm", "Kind of normalisation; te_*: under Transformer-Engine's names"
    )
    use_qk_layernorm: bool = key(False, "Normalise queries and keys: layernorm over all heads, rmsnorm over each head")
    qk_norm_after_rotary: bool = new_key(
        False, "With use_separate_qk_norms: normalise queries and keys after their rotation, as HunYuan"
    )
    qk_norm_per_head: bool = new_key(
        False, "With use_separate_qk_norms: normalise each head alone, with one weight for all heads, as Qwen 3"
    )
    use_separate_qk_norms: bool = key(
        False,
        "OLMo: RMSNorm over all queries and over all keys",
        differs="the geodesic fork normalises the heads of each tensor rank separately",
        source="fork",
    )
    use_v_norm: bool = new_key(
        False, "Normalise each head's values by RMSNorm without weights, with the epsilon of the norms, as in Gemma 4"
    )
    norm_placement: Literal["pre", "post", "olmo3", "sandwich"] = key(
        "pre",
        "Place of the norms: before attention and MLP (pre), on their outputs (olmo3), or both (sandwich: Gemma 3)",
        refuse_values={"post": "the geodesic fork trained pre under this name; write pre, or olmo3"},
        source="fork",
    )
    zero_centered_gamma: bool = new_key(
        False, "Multiply by 1 + weight in rmsnorm and layernorm, as Gemma; also for queries and keys"
    )
    layernorm_epsilon: float = key(1e-5, "Added to the variance in layernorm", gt=0)
    rms_norm_epsilon: float = key(
        1e-8,
        "Added to the mean square in rmsnorm",
        gt=0,
        differs="before #1345 (2025) GPT-NeoX added it to the root instead",
    )
    scalenorm_epsilon: float = key(1e-8, "Smallest length in scalenorm", gt=0)
    pos_emb: Literal["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"] = key(
        "learned", "Kind of position information; rpe: T5's buckets"
    )
    opt_pos_emb_offset: int = key(0, "With pos_emb learned: rows of the table before position 0, as in OPT", ge=0)
    rpe_num_buckets: int = key(32, "With pos_emb rpe: number of buckets of distances", ge=2)
    rpe_max_distance: int = key(128, "With pos_emb rpe: all distances from this one on share a bucket", ge=2)
    rope_scaling: Mapping[str, Any] | None = new_key(
        None, "Stretch rotary positions to longer sequences, with HuggingFace's names", section=RopeScaling
    )
    rope_local_base_freq: float | None = new_key(
        None, "Base of the rotary frequencies in sliding_attention layers; rope_scaling then skips these layers", gt=0
    )
    no_rope_layers: tuple[int, ...] | None = new_key(
        None,
        "rotary: a list of 1 (layer with positions) and 0 (layer without); a shorter list repeats. As in SmolLM3",
    )
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = new_key(
        None,
        "sliding_attention layers use sliding_window_width, full_attention layers do not; a shorter list repeats. "
        "Unset: all use it",
    )
    rotary_save_freqs_buffer: bool = key(False, "Write the rotary frequencies into checkpoints, as Pythia's files have")
    sliding_window_width: int | None = key(
        None,
        "Each token sees this many tokens before it, besides itself",
        ge=1,
        differs="GPT-NeoX ignores it with `global` attention and pipe_parallel_size 0",
    )
    rotary_pct: float = key(1.0, "Share of each head's dimensions to rotate", gt=0, le=1)
    rotary_emb_base: int | float = key(10000, "Base of the rotary frequencies", gt=0)
    rotary_interleaved: bool = new_key(
        False,
        "Rotate neighbouring dimensions (0 and 1, 2 and 3, ...) instead of halves of a head; GPT-J, GLM 4, Cohere 2",
    )
    query_pre_attn_scalar: float | None = new_key(
        None, "Divide attention logits by the square root of this; unset: head_dim", gt=0
    )
    attention_multiplier: float | None = new_key(
        None, "Multiply attention logits by this instead of dividing them, as Granite", gt=0
    )
    attn_logit_softcapping: float | None = new_key(
        None,
        "Cap attention logits x to c tanh(x / c) with this c, as in Gemma 2. Runs on flex (GPUs), flash_attn, or "
        "math (with all logits in memory)",
        gt=0,
    )
    final_logit_softcapping: float | None = new_key(
        None, "Cap token logits x to c tanh(x / c) with this c, as in Gemma 2", gt=0
    )
    attention_sinks: bool = new_key(
        False,
        "Add a trained logit per head to the softmax of every query; its share goes to no value, as in gpt-oss. "
        "Runs on flex (GPUs), or math (with all logits in memory)",
    )
    attention_output_gate: bool = new_key(
        False,
        "Multiply attention's outputs, before the output projection, by the sigmoid of a gate that is projected "
        "with the queries, as in Qwen 3-Next",
    )
    attention_k_eq_v: bool = new_key(
        False,
        "In layers without a window, values are the projected keys before their norm and rotation, as in Gemma 4 (31B)",
    )
    layer_scalar: bool = new_key(
        False, "Multiply the output of each block by a number of its own that is not trained, 1 at first; as in Gemma 4"
    )
    clip_qkv: float | None = new_key(
        None, "Clamp queries, keys and values to +- this after their norms, as in OLMo 1 and OLMoE", gt=0
    )
    embedding_multiplier: float = new_key(
        1.0, "Multiply token embeddings by this, rounded to their type; Gemma: root of hidden_size", gt=0
    )  # fmt: skip
    residual_multiplier: float = new_key(1.0, "Multiply the outputs of attention and MLP by this, as in Granite", gt=0)
    logit_scale: float = new_key(
        1.0, "Multiply token logits by this, as in Cohere 2; Granite: 1 / logits_scaling", gt=0
    )
    no_weight_tying: bool = key(False, "Give the output layer its own weights instead of the embedding's")
    score_head: bool | None = new_key(
        None,
        "The output layer gives one score per token, as in a reward model, and is never tied; unset: with "
        "train_impl rm",
    )
    attention_config: tuple[Any, ...] = key(
        None,
        "Kind of each layer, as in [[[flash], 12]]. Kinds global, flash: attention and MLP; both compute the same. "
        "Kinds gated_delta_net, kimi_delta_attention, short_conv, mamba2_mlp: a delta rule, a short convolution or "
        "Mamba 2, and MLP. Kinds mamba, mamba2, attention, mlp, moe: only that, after one norm; a list of these is a "
        "hybrid. If both global and flash occur, flash layers use the flash kernel and global ones attention_backend. "
        "If flash cannot do the run, all use attention_backend, and a line says so",
        refuse_values={
            **dict.fromkeys(
                ("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer"),
                "DeepSpeed's sparse attention is gone (GPT-NeoX commit ea7aefd8 still names it); use flash, "
                "with sliding_window_width for a window",
            ),
            **dict.fromkeys(("gmlp", "amlp"), "gMLP and aMLP are not here; GPT-NeoX commit ea7aefd8 has them"),
            "rwkv": "RWKV is not here; GPT-NeoX commit ea7aefd8 has it",
        },
    )
    sparsity_config: Mapping[str, Any] | None = key(
        None, "DeepSpeed's sparse attention", refuse="DeepSpeed 0.19.8 no longer has it; remove it"
    )
    attention_backend: AttentionBackendName = new_key(
        "auto",
        "Attention kernel. auto chooses one per kind of call, and prints it once. Rows of seq_length take cudnn "
        "on Hopper. Other GPUs, lengths, documents and windows take flash, shared prompts flex. If that does not "
        "work, auto takes the next in this order. It never chooses flash3, flash4, flash_attn or "
        "transformer_engine. flash3 and flash4 replace torch's flash in the whole process",
    )
    apex: Literal["auto"] | bool = new_key(
        False,
        "Use FusedLayerNorm, FusedRMSNorm and (native engine) FusedAdam of NVIDIA's apex. auto: if it is "
        "installed and works, on tested GPU models (none so far). Compiled blocks keep torch's norms, fused by "
        "the compiler",
    )
    make_vocab_size_divisible_by: int = key(
        128,
        "Pad the vocabulary to a multiple of this",
        ge=1,
        differs="GPT-NeoX pads to a multiple of this x model_parallel_size: padded_vocab_size takes any size",
    )
    padded_vocab_size: int = key(None, "Rows of the embedding; unset: made from the tokenizer", ge=1)
    mask_padded_vocab: Literal["auto"] | bool | int = new_key(
        "auto",
        "Exclude padding rows of the vocabulary from the softmax. true: rows after the tokenizer's tokens. A "
        "number: all rows after this many real ones. auto: rows after the real ones, if the checkpoint or its import "
        "from HuggingFace names these",
    )
    activation: Activation = key(
        "gelu",
        "Activation of the MLP; geglu*, reglu, swiglu*, bilinear and glu are gated. swigluoai: gpt-oss's, "
        "clamped; relu2: square of relu; xielu: with two trained numbers per layer (arXiv 2411.13010), as in "
        "Apertus",
    )
    bias_gelu_fusion: bool = key(False, "Use the tanh approximation of gelu, as the fused kernel of GPT-NeoX does")
    init_method: Init = key("normal", "Initialisation of embeddings and of linears reading the residual stream")
    output_layer_init_method: Init = key("scaled_normal", "Initialisation of linears writing to the residual stream")
    init_method_std: float = key(0.02, "Standard deviation of the normal initialisations", ge=0)
    gpt_j_residual: bool = key(
        False,
        "Attention and MLP in parallel: x + attn(ln1(x)) + mlp(ln2(x))",
        differs="with use_bias_in_mlp: false GPT-NeoX drops the attention's output (since PR #1278)",
    )
    gpt_j_tied: bool = key(False, "gpt_j_residual: one norm for both, x + attn(ln1(x)) + mlp(ln1(x))")
    use_bias_in_attn_linear: bool = key(True, "Biases in the attention's linears")
    add_qkv_bias: bool = new_key(
        False, "Biases of queries, keys and values only, with use_bias_in_attn_linear: false; as in Qwen 2"
    )
    use_bias_in_mlp: bool = key(True, "Biases in the MLP's linears")
    use_bias_in_norms: bool = key(
        True,
        "Biases in layernorm",
        differs="GPT-NeoX never reads it: compat_norm_bias keeps the biases",
        unread="false removes the biases, as a line at start says; GPT-NeoX's checkpoints are then refused, naming "
        "this key",
    )
    compat_norm_bias: bool = new_key(False, "Keep layernorm's biases despite use_bias_in_norms, as GPT-NeoX does")
    attention_dropout: float = key(0.0, "Dropout of attention probabilities", ge=0, lt=1)
    hidden_dropout: float = key(0.0, "Dropout of each block's addition to the residual stream", ge=0, lt=1)
    output_layer_parallelism: Literal["column", "row"] = key(
        "column",
        "How the output layer is split",
        refuse_values={"row": "GPT-NeoX broke it (#905) and took it out; write column"},
    )
    compile: Literal["auto", False, "block", "block-max"] = new_key(
        "auto",
        "Compile each kind of transformer block once with torch.compile. block-max: also try every kernel for "
        "its products (max-autotune, minutes at the start). auto: block on GPUs with Triton and a C compiler",
    )
    scaled_upper_triang_masked_softmax_fusion: bool = key(False, "Fused causal softmax", no_effect=_KERNEL)
    scaled_masked_softmax_fusion: bool = key(False, "Fused masked softmax", no_effect=_KERNEL)
    fp16_lm_cross_entropy: bool = key(
        False, "Compute the loss in fp16", refuse="the loss is computed in fp32, just as fast here; remove it"
    )
    apply_query_key_layer_scaling: bool = key(
        False, "Divide attention scores by the layer's number and undo it in softmax", no_effect=_KERNEL
    )
    attention_softmax_in_fp32: bool = key(False, "Softmax in fp32", no_effect="it always is")
    use_cpu_initialization: bool = key(False, "Draw weights on the CPU", no_effect="weights are the same anywhere")
    use_flashattn_swiglu: bool = key(False, "flash-attn's kernel of swiglu", no_effect=_KERNEL)
    fused_kernels_build_path: str | None = key(None, "Build folder of kernels", no_effect="none are compiled")
    rope_fusion: bool = key(False, "Fused rotary embedding", no_effect=_KERNEL)
    layernorm_fusion: bool = key(False, "Fused layernorm", no_effect=_NORM_KERNEL)
    rmsnorm_fusion: bool = key(False, "Fused rmsnorm", no_effect=_NORM_KERNEL)
    bias_dropout_fusion: bool = key(False, "Fused bias and dropout", no_effect=_KERNEL)


@dataclass(frozen=True)
class PrecisionKeys:
    """Configuration keys of the precision in which the model is computed."""

    precision: Literal["fp32", "fp16", "bfloat16"] = key(
        None, "Type of weights and activations; unset: by fp16, bf16, else fp32"
    )
    qat: Literal["mxfp4", "nvfp4"] | None = new_key(
        None,
        "Quantisation-aware training: round the weights of linears and experts to this format in forward passes; "
        "gradients pass straight through",
    )
    fp16: Mapping[str, Any] | None = key(None, "Training in fp16, and its loss scaling", section=Fp16)
    bf16: Mapping[str, Any] | None = key(None, "Training in bf16", section=Bf16)
    data_types: Mapping[str, Any] | None = key(None, "DeepSpeed's data types", section=DataTypes)
