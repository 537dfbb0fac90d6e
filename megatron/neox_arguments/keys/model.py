"""Keys that say what the model is, and in which precision it is computed."""

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
    """The shape of the model: layers, heads, positions, norms, activations, initialisation."""

    num_layers: int = key(REQUIRED, "Number of transformer blocks", ge=1, le=10_000)
    hidden_size: int = key(REQUIRED, "Width of the residual stream", ge=1)
    num_attention_heads: int = key(REQUIRED, "Number of attention heads", ge=1)
    num_kv_heads: int | tuple[int, ...] | None = key(
        None,
        "Key-value heads (GQA, MQA); a list: of each layer, a shorter one repeats; unset: num_attention_heads. More "
        "tensor ranks than heads share them",
        ge=1,
    )
    compat_gqa_rows: Literal["pre1315", "post1315"] | None = new_key(
        None,
        "num_kv_heads in GPT-NeoX's checkpoints: query, key and value rows as before its #1315 (November 2024), or as "
        "since; unset: as since, and under the names of before mid-2024 as before. Own checkpoints tell it themselves",
    )
    head_dim: int = new_key(None, "Width of a head; unset: hidden_size / num_attention_heads", ge=1)
    seq_length: int = key(REQUIRED, "Tokens of one sample", ge=1)
    max_position_embeddings: int = key(REQUIRED, "Longest sequence the model can read; rows of learned positions", ge=1)
    intermediate_size: int | tuple[int, ...] | None = key(
        None,
        "Inner width of the MLP, as it is; a list: of each layer, a shorter one repeats",
        ge=1,
        differs="GPT-NeoX takes 2/3 of it for gated activations: compat_ffn_width",
    )
    expansion_factor: float | None = key(
        None, "Inner width in units of hidden_size when intermediate_size is unset; 4", gt=0
    )
    mlp_multiple_of: int = key(1, "An inner width that is not given is rounded up to a multiple of this", ge=1)
    compat_ffn_width: Literal["none", "upstream", "fork"] | None = new_key(
        None, "Whose inner width the keys mean: as they are (none), GPT-NeoX's (upstream) or its geodesic fork's"
    )
    norm: Literal["layernorm", "rmsnorm", "non_parametric_layernorm", "scalenorm", "te_rmsnorm", "te_layernorm"] = key(
        "layernorm", "Kind of normalisation; te_*: under Transformer-Engine's names"
    )
    use_qk_layernorm: bool = key(False, "Normalise queries and keys: layernorm over all heads, rmsnorm over each head")
    qk_norm_per_head: bool = new_key(
        False, "use_separate_qk_norms: over each head alone, with one weight for all, as Qwen 3"
    )
    use_separate_qk_norms: bool = key(
        False,
        "OLMo: RMSNorm over all queries and over all keys",
        differs="the geodesic fork normalises the heads of each tensor rank by themselves",
        source="fork",
    )
    norm_placement: Literal["pre", "post", "olmo3", "sandwich"] = key(
        "pre",
        "Where blocks normalise: before attention and MLP, (olmo3) what these add, or (sandwich: Gemma 3) both",
        refuse_values={"post": "the geodesic fork trained pre under this name; write pre, or olmo3"},
        source="fork",
    )
    zero_centered_gamma: bool = new_key(
        False, "rmsnorm multiplies by 1 + its weight, as Gemma's; also those of queries and keys"
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
    opt_pos_emb_offset: int = key(0, "learned: rows of the table before position 0, as in OPT", ge=0)
    rpe_num_buckets: int = key(32, "rpe: distances told apart", ge=2)
    rpe_max_distance: int = key(128, "rpe: distances from here on are one", ge=2)
    rope_scaling: Mapping[str, Any] | None = new_key(
        None, "Stretch rotary positions to longer sequences, with HuggingFace's names", section=RopeScaling
    )
    rope_local_base_freq: float | None = new_key(
        None, "Base of the rotary frequencies in sliding_attention layers, which rope_scaling then leaves alone", gt=0
    )
    no_rope_layers: tuple[int, ...] | None = new_key(
        None, "rotary: 1 for layers that rotate, 0 for those without positions; a shorter list repeats. As in SmolLM3"
    )
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = new_key(
        None, "Which layers sliding_window_width holds for; a shorter list repeats. Unset: for all"
    )
    rotary_save_freqs_buffer: bool = key(False, "Write the rotary frequencies into checkpoints, as Pythia's files have")
    sliding_window_width: int | None = key(
        None,
        "A token sees this many tokens before it, besides itself",
        ge=1,
        differs="GPT-NeoX ignores it with `global` attention and pipe_parallel_size 0",
    )
    rotary_pct: float = key(1.0, "Share of each head's dimensions that is rotated", gt=0, le=1)
    rotary_emb_base: int | float = key(10000, "Base of the rotary frequencies", gt=0)
    rotary_interleaved: bool = new_key(
        False, "Rotate neighbouring dimensions (0 and 1, 2 and 3, ...) and not halves of a head; GPT-J, GLM 4, Cohere 2"
    )
    query_pre_attn_scalar: float | None = new_key(
        None, "Attention logits are divided by its root; unset: head_dim", gt=0
    )
    attention_multiplier: float | None = new_key(
        None, "Attention logits are multiplied by this, instead of being divided; as Granite", gt=0
    )
    attn_logit_softcapping: float | None = new_key(
        None,
        "Attention logits x become c tanh(x / c) with this c, as in Gemma 2; flex does it on GPUs, math anywhere, with "
        "all logits in memory",
        gt=0,
    )
    final_logit_softcapping: float | None = new_key(
        None, "Logits of tokens x become c tanh(x / c) with this c, as in Gemma 2", gt=0
    )
    attention_sinks: bool = new_key(
        False,
        "Each head has a trained logit that takes part in the softmax of every query and gives its share to no value, "
        "as in gpt-oss; flex does it on GPUs, math anywhere, with all logits in memory",
    )
    clip_qkv: float | None = new_key(
        None, "Queries, keys and values are clamped to +- this behind their norms, as in OLMo 1 and OLMoE", gt=0
    )
    embedding_multiplier: float = new_key(
        1.0, "Token embeddings are multiplied by this, rounded to their type; Gemma: root of hidden_size", gt=0
    )  # fmt: skip
    residual_multiplier: float = new_key(
        1.0, "What attention and MLP add to the residual stream is multiplied by this, as in Granite", gt=0
    )
    logit_scale: float = new_key(
        1.0, "Logits of tokens are multiplied by this, as in Cohere 2; Granite: 1 / logits_scaling", gt=0
    )
    no_weight_tying: bool = key(False, "Give the output layer its own weights instead of the embedding's")
    score_head: bool | None = new_key(
        None,
        "The output layer gives one score a token, as a reward model's, and always has its own weights; unset: with "
        "train_impl rm",
    )
    attention_config: tuple[Any, ...] = key(
        None,
        "Kind of each layer, as in [[[flash], 12]]. global and flash: attention and MLP, the same mathematics; mamba, "
        "mamba2, attention, mlp, moe: that alone, behind one norm, so that a list of these is a hybrid. Where global "
        "and flash occur, flash layers run on the flash kernel, global ones on attention_backend, and flash ones too "
        "where flash cannot do the run, which is printed",
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
        "Kernel of attention. auto, for each kind of call: cudnn for rows of seq_length on Hopper, flash on other "
        "GPUs, for other lengths, for documents and windows, flex for shared prompts, else the first that works, in "
        "the order named; printed once. Only where they are named run flash3 and flash4 (packages that torch puts in "
        "the place of its own flash, for the whole process), flash_attn and transformer_engine",
    )
    apex: Literal["auto"] | bool = new_key(
        False,
        "Use FusedLayerNorm, FusedRMSNorm and (native engine) FusedAdam of NVIDIA's apex; auto: where it is installed "
        "and works, on GPUs that it has run on: none so far. Compiled blocks keep torch's norms, which the compiler "
        "fuses",
    )
    make_vocab_size_divisible_by: int = key(
        128,
        "The vocabulary is padded to a multiple of this",
        ge=1,
        differs="GPT-NeoX pads to a multiple of this x model_parallel_size: padded_vocab_size takes any size",
    )
    padded_vocab_size: int = key(None, "Rows of the embedding; unset: made from the tokenizer", ge=1)
    mask_padded_vocab: Literal["auto"] | bool | int = new_key(
        "auto",
        "Leave the rows that pad the vocabulary out of the softmax. true: those behind the tokenizer's tokens; a "
        "number: those behind so many; auto: where the checkpoint, or its import from HuggingFace, says which are real",
    )
    activation: Activation = key(
        "gelu",
        "Activation of the MLP; geglu*, reglu, swiglu*, bilinear and glu are gated. swigluoai: gpt-oss's, clamped; "
        "relu2: the square of relu; xielu: with two trained numbers a layer (arXiv 2411.13010), as in Apertus",
    )
    bias_gelu_fusion: bool = key(False, "Use the tanh approximation of gelu, as the fused kernel of GPT-NeoX does")
    init_method: Init = key("normal", "Initialisation of embeddings and of linears that read the residual stream")
    output_layer_init_method: Init = key("scaled_normal", "Initialisation of linears that write to the residual stream")
    init_method_std: float = key(0.02, "Standard deviation of the normal initialisations", ge=0)
    gpt_j_residual: bool = key(
        False,
        "Attention and MLP side by side: x + attn(ln1(x)) + mlp(ln2(x))",
        differs="with use_bias_in_mlp: false GPT-NeoX drops the attention's output (since PR #1278)",
    )
    gpt_j_tied: bool = key(False, "gpt_j_residual: one norm for both, x + attn(ln1(x)) + mlp(ln1(x))")
    use_bias_in_attn_linear: bool = key(True, "Biases in the attention's linears")
    add_qkv_bias: bool = new_key(
        False, "Biases of queries, keys and values alone, with use_bias_in_attn_linear: false; as in Qwen 2"
    )
    use_bias_in_mlp: bool = key(True, "Biases in the MLP's linears")
    use_bias_in_norms: bool = key(
        True,
        "Biases in layernorm",
        differs="GPT-NeoX never reads it: compat_norm_bias keeps the biases",
        unread="false makes another layernorm: said at start; a checkpoint of theirs is refused, and names that key",
    )
    compat_norm_bias: bool = new_key(False, "Keep layernorm's biases whatever use_bias_in_norms says, as GPT-NeoX does")
    attention_dropout: float = key(0.0, "Dropout of attention probabilities", ge=0, lt=1)
    hidden_dropout: float = key(0.0, "Dropout of what a block adds to the residual stream", ge=0, lt=1)
    output_layer_parallelism: Literal["column", "row"] = key(
        "column",
        "How the output layer is split",
        refuse_values={"row": "GPT-NeoX broke it (#905) and took it out; write column"},
    )
    compile: Literal["auto", False, "block", "block-max"] = new_key(
        "auto",
        "Compile each kind of transformer block once with torch.compile; block-max: and try every kernel for its "
        "products (max-autotune, minutes at the start); auto: block on GPUs where Triton and a C compiler are found",
    )
    scaled_upper_triang_masked_softmax_fusion: bool = key(False, "Fused causal softmax", no_effect=_KERNEL)
    scaled_masked_softmax_fusion: bool = key(False, "Fused masked softmax", no_effect=_KERNEL)
    fp16_lm_cross_entropy: bool = key(
        False, "Compute the loss in fp16", refuse="the loss is computed in fp32, which is as fast here; remove it"
    )
    apply_query_key_layer_scaling: bool = key(
        False, "Divide attention scores by the layer's number and undo it in softmax", no_effect=_KERNEL
    )
    attention_softmax_in_fp32: bool = key(False, "Softmax in fp32", no_effect="it always is")
    use_cpu_initialization: bool = key(False, "Draw weights on the CPU", no_effect="weights are the same anywhere")
    use_flashattn_swiglu: bool = key(False, "flash-attn's kernel of swiglu", no_effect=_KERNEL)
    fused_kernels_build_path: str | None = key(None, "Where kernels are compiled", no_effect="none are compiled")
    rope_fusion: bool = key(False, "Fused rotary embedding", no_effect=_KERNEL)
    layernorm_fusion: bool = key(False, "Fused layernorm", no_effect=_NORM_KERNEL)
    rmsnorm_fusion: bool = key(False, "Fused rmsnorm", no_effect=_NORM_KERNEL)
    bias_dropout_fusion: bool = key(False, "Fused bias and dropout", no_effect=_KERNEL)


@dataclass(frozen=True)
class PrecisionKeys:
    """In which precision the model is computed."""

    precision: Literal["fp32", "fp16", "bfloat16"] = key(
        None, "Type of weights and activations; unset: by fp16, bf16, else fp32"
    )
    fp16: Mapping[str, Any] | None = key(None, "fp16 and its loss scaling", section=Fp16)
    bf16: Mapping[str, Any] | None = key(None, "bf16", section=Bf16)
    data_types: Mapping[str, Any] | None = key(None, "DeepSpeed's data types", section=DataTypes)
