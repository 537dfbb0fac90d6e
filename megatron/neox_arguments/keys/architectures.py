"""Declares the keys of Transformer-Engine's layers, latent attention, experts, Mamba, Gated DeltaNet, others.

Some keys are refused: they belong to features of GPT-NeoX that were dropped or are not built yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key

_MUP = "MuP"
_MUP_UNREAD = "the run stops at start, as with every key of MuP; remove the key"
_MAMBA_KERNELS = "mamba_backend chooses kernels; the numbers are the same"
_SAME_LINEARS = "our own linears have the same maths and names on disk"
_RWKV = "RWKV is not here; GPT-NeoX commit ea7aefd8 has it"
_GMLP = "gMLP and aMLP are not here; GPT-NeoX commit ea7aefd8 has them"


@dataclass(frozen=True)
class TransformerEngineKeys:
    """Configuration keys of Transformer-Engine's kernels, and of layers with its parameter names in
    checkpoints."""

    te_backend: Literal["auto", "native", "transformer_engine"] = new_key(
        "auto",
        "Kernels of FP8 products and norms. native: torch's; transformer_engine: the package's, except in "
        "compiled blocks; auto: its products for precision_fp8: te if it works, on tested GPU models (none so "
        "far), else native. Layers, and their names on disk with te_mha and te_layernorm_mlp, are our own either "
        "way",
    )
    te_mha: bool = key(False, "Transformer-Engine's attention")
    te_layernorm_mlp: bool = key(False, "Transformer-Engine's MLP, including the norm before it")
    te_columnparallel: bool = key(False, "Transformer-Engine's column-parallel linears", no_effect=_SAME_LINEARS)
    te_rowparallel: bool = key(False, "Transformer-Engine's row-parallel linears", no_effect=_SAME_LINEARS)


@dataclass(frozen=True)
class LatentAttentionKeys:
    """Configuration keys of multi-head latent attention (MLA, arXiv 2405.04434), by HuggingFace's names."""

    kv_lora_rank: int | None = new_key(
        None,
        "Multi-head latent attention (MLA) in all attention blocks, as in DeepSeek V2 and V3: keys and values are made "
        "from a latent of this width, which a cache holds in their place; unset: usual attention",
        ge=1,
    )
    q_lora_rank: int | None = new_key(
        None, "MLA: make queries from a latent of this width; unset: from hidden states", ge=1
    )
    qk_nope_head_dim: int | None = new_key(
        None, "MLA: dimensions of a head's queries and keys without rotary positions", ge=1
    )
    qk_rope_head_dim: int | None = new_key(
        None, "MLA: dimensions of a head's queries and keys with rotary positions; all heads share them in keys", ge=1
    )
    v_head_dim: int | None = new_key(None, "MLA: width of a head's values", ge=1)
    latent_norm_epsilon: float = new_key(
        1e-6, "MLA: added to the mean square in the RMSNorms of latents, which do not follow rms_norm_epsilon", gt=0
    )


@dataclass(frozen=True)
class MoEKeys:
    """Configuration keys of mixtures of experts."""

    moe_num_experts: int = key(1, "Experts per feed-forward; 1: dense", ge=1)
    moe_expert_interval: int = key(1, "Every n-th block has experts, beginning with the first block", ge=1)
    moe_layer_freq: tuple[int, ...] | None = new_key(
        None, "1 for blocks with experts, 0 for dense ones; a shorter list repeats. Unset: moe_expert_interval", ge=0
    )
    moe_intermediate_size: int | None = new_key(
        None,
        "Inner width of an expert; unset: intermediate_size, else 4 times hidden_size (gated: 8/3), rounded up to 256",
        ge=1,
    )
    moe_latent_size: int | None = new_key(
        None,
        "Project tokens to this width before the experts, and back after, by linears that all experts share, as in "
        "Nemotron 3; unset: no projection",
        ge=1,
    )
    moe_shared_expert_intermediate_size: int | None = new_key(
        None, "Inner width of a feed-forward for all tokens beside the experts; unset: none", ge=1
    )
    moe_shared_expert_gate: bool = new_key(
        False, "Multiply the shared expert's output by the sigmoid of a trained gate, as in Qwen 2 MoE"
    )
    moe_top_k: int = key(1, "Experts per token", ge=1)
    moe_router_type: Literal["sinkhorn", "topk"] = key(
        "sinkhorn",
        "Choice of experts: the moe_top_k best per token; sinkhorn, in training: from scores first balanced over "
        "the tokens of a micro-batch",
        differs="sinkhorn balances without padding, and never waits for the device",
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = new_key(
        None, "Scores of experts from the router's logits; unset: softmax, and sigmoid for sinkhorn with moe_top_k 1"
    )
    norm_topk_prob: bool = new_key(False, "Divide the scores of a token's experts by their sum")
    moe_router_topk_scaling_factor: float = new_key(1.0, "Multiply the scores of a token's experts by this", gt=0)
    moe_router_num_groups: int | None = new_key(
        None, "Groups of neighbouring experts; a token uses moe_router_group_topk of them; unset: one", ge=1
    )
    moe_router_group_topk: int | None = new_key(
        None, "Groups open to a token: those with the highest score (moe_router_group_score)", ge=1
    )
    moe_router_group_score: Literal["best_two", "best"] = new_key(
        "best_two",
        "Score of a group: the sum of its two best scores, as in DeepSeek V3, or its best, as in DeepSeek V2",
    )
    moe_router_bias: bool = new_key(False, "Trained bias in the router's logits, as in gpt-oss")
    moe_expert_bias: bool = new_key(False, "Biases in the linears of experts, as in gpt-oss")
    moe_router_bias_update_rate: float | None = new_key(
        None,
        "Balance without a loss (arXiv 2408.15664): a bias per expert, used only in the choice, moves by this "
        "each step; unset: none",
        ge=0,
    )
    moe_aux_loss_coeff: float = new_key(
        0.0, "Factor of the load-balancing loss (Switch Transformer, arXiv 2101.03961)", ge=0
    )
    moe_aux_loss_scope: Literal["micro_batch", "sequence", "step", "transformers"] = new_key(
        "micro_batch",
        "Tokens of the load-balancing loss: a rank's micro-batch, each row (sequence), or all of a step (one "
        "more forward pass). The losses of all layers are summed. transformers: HuggingFace's loss, over a "
        "micro-batch and all layers together, times moe_top_k",
    )
    moe_z_loss_coeff: float = new_key(
        0.0, "Factor of the mean square of the log of the router's normaliser (ST-MoE, arXiv 2202.08906)", ge=0
    )
    moe_lbl_in_fp32: bool = key(
        False,
        "Load-balancing loss in fp32",
        no_effect="it is always computed in fp32, and so are the router's scores",
        unread="GPT-NeoX ignores it too",
    )
    moe_jitter_eps: float | None = key(
        None, "topk: in training, multiply the router's input by random numbers within 1 +- this", ge=0, lt=1
    )
    moe_expert_capacity_factor: float | None = new_key(
        None,
        "Most tokens of an expert, in units of the mean per expert of a rank's micro-batch; more are dropped, "
        "lowest scores first, and counted. Unset: none is dropped",
        gt=0,
    )
    moe_expert_tensor_parallel: Literal["whole", "cut"] = new_key(
        "whole", "Tensor-parallel ranks hold different experts (whole; GPT-NeoX), or a slice of each (cut)"
    )
    expert_parallel_size: int = new_key(
        1,
        "Neighbouring data-parallel ranks to share the experts; tokens travel between them. Must divide "
        "data-parallel size x context_parallel_size; engine native only",
        ge=1,
    )
    expert_parallel_across_nodes: bool = new_key(
        False, "Let tokens travel between machines; some networks hang under such traffic"
    )


@dataclass(frozen=True)
class MambaKeys:
    """Configuration keys of Mamba and Mamba 2, the blocks `mamba` and `mamba2` of attention_config."""

    mamba_selective_scan_fusion: bool = key(False, "Fused scan", no_effect=_MAMBA_KERNELS)
    mamba_causal_conv_fusion: bool = key(False, "Fused convolution", no_effect=_MAMBA_KERNELS)
    mamba_inner_func_fusion: bool = key(False, "Fused mixer", no_effect=_MAMBA_KERNELS)
    mamba_selective_fp32_params: bool = key(
        True,
        "Keep A_log and D, also of delta rules, in fp32 beside 16-bit weights; engine native. DeepSpeed "
        "keeps fp32 masters but rounds them for use, and says so",
    )
    mamba_use_bias_in_conv: bool = key(True, "Bias of the convolution")
    mamba_use_bias_in_linears: bool = key(False, "Biases of in_proj, out_proj and (Mamba 1) x_proj")
    mamba_backend: Literal["auto", "torch", "mamba_ssm", "fla"] = new_key(
        "auto",
        "Kernels of scans and convolutions. torch: plain operations. mamba_ssm: the package, with causal-conv1d "
        "if installed. fla: flash-linear-attention, for Mamba 2 and delta rules. auto, for Mamba alone, prints its "
        "choice: the first of mamba_ssm and fla that is installed and works, on tested GPU models (none so far), else "
        "torch",
    )
    mamba_state_dim: int | None = new_key(
        None, "State size N per channel (Mamba 2: per head); unset: 16, Mamba 2: 128", ge=1
    )
    mamba_expand: int = new_key(2, "Channels of a mixer, in units of hidden_size", ge=1)
    mamba_conv_kernel: int = new_key(4, "Width of the causal convolution, in tokens", ge=1)
    mamba_dt_rank: int | None = new_key(
        None, "Mamba 1: rank of the projection of time steps; unset: hidden_size / 16, rounded up", ge=1
    )
    mamba_bcdt_norm_epsilon: float | None = new_key(
        None, "Mamba 1: apply RMS norms without weights to B, C and time steps, as in Falcon-Mamba; unset: none", gt=0
    )
    mamba_num_heads: int | None = new_key(
        None, "Mamba 2: heads; unset: mamba_expand x hidden_size / mamba_head_dim", ge=1
    )
    mamba_head_dim: int = new_key(64, "Mamba 2: channels of a head", ge=1)
    mamba_num_groups: int = new_key(
        8, "Mamba 2: number of groups of heads that share B, C and the gated norm's mean", ge=1
    )
    mamba_chunk_size: int = new_key(
        256, "Mamba 2: tokens per chunk of the scan; changes results only by rounding", ge=1
    )
    mamba_time_step_limit: tuple[float, ...] | None = new_key(
        None, "Mamba 2: clamp time steps to [low, high] or [low]; unset: no clamping", ge=0
    )
    mamba_state_fp32: bool = new_key(
        True,
        "Keep the state in fp32, in scans and between tokens, as long documents need; false: in the weights' "
        "type, with less memory",
    )


@dataclass(frozen=True)
class DeltaRuleKeys:
    """Configuration keys of the blocks gated_delta_net and kimi_delta_attention, by HuggingFace's names."""

    linear_num_key_heads: int = new_key(
        16, "Delta rules: heads of queries and keys; kimi_delta_attention: of values too", ge=1
    )
    linear_num_value_heads: int = new_key(
        32, "Delta rules: heads, each with a state; a multiple of linear_num_key_heads", ge=1
    )
    linear_key_head_dim: int = new_key(
        128, "Delta rules: width of a head's queries and keys; kimi_delta_attention: of values too", ge=1
    )
    linear_value_head_dim: int = new_key(128, "Delta rules: width of a head's values", ge=1)
    linear_conv_kernel_dim: int = new_key(4, "Delta rules: width of the causal convolution, in tokens", ge=1)
    linear_chunk_size: int = new_key(
        64, "Delta rules: tokens per chunk of the scan; changes results only by rounding", ge=1
    )


@dataclass(frozen=True)
class ShortConvKeys:
    """Configuration keys of the blocks short_conv (LFM 2)."""

    short_conv_kernel: int = new_key(3, "Short convolutions: width, in tokens", ge=1)
    use_bias_in_short_conv: bool = new_key(
        False, "Short convolutions: biases in the convolution and in the linear layers around it"
    )


@dataclass(frozen=True)
class MultiTokenPredictionKeys:
    """Configuration keys of multi-token prediction, by Megatron-LM's names."""

    mtp_num_layers: int | None = new_key(
        None,
        "Multi-token prediction: add this many blocks after the last one. In training, block k also predicts, "
        "from position i, token i + k + 1, as in DeepSeek V3; unset: none",
        ge=1,
    )
    mtp_loss_scaling_factor: float = new_key(
        0.1,
        "Multi-token prediction: the mean of the blocks' losses is multiplied by this in the gradient; the logged "
        "lm_loss leaves it out",
        ge=0,
    )


@dataclass(frozen=True)
class OtherArchitectureKeys:
    """Configuration keys of RWKV, gMLP and soft prompts, all of which a run refuses."""

    dim_att: int | None = key(None, "RWKV's attention width", refuse=_RWKV)
    head_size: int | None = key(None, "RWKV's head width", refuse=_RWKV)
    ffn_dim: int | None = key(None, "RWKV's inner width", refuse=_RWKV)
    gmlp_attn_dim: int = key(64, "Width of aMLP's attention", refuse=_GMLP)
    soft_prompt_tuning: Mapping[str, Any] | None = key(None, "Trained prompt vectors", not_built="soft prompt tuning")


@dataclass(frozen=True)
class MuPKeys:
    """Configuration keys of the maximal update parametrisation (muP), which is not built yet."""

    use_mup: bool = key(False, "Maximal update parametrisation", not_built=_MUP)
    coord_check: bool = key(False, "Plot coordinate sizes over widths and end", not_built=_MUP)
    save_base_shapes: bool = key(False, "Write base_shapes_file and end", not_built=_MUP)
    base_shapes_file: str | None = key(None, "Shapes of the base model", not_built=_MUP)
    mup_init_scale: float = key(1.0, "Multiplies initial weights", not_built=_MUP)
    mup_attn_temp: float = key(1.0, "Multiplies attention logits", not_built=_MUP, unread=_MUP_UNREAD)
    mup_output_temp: float = key(1.0, "Multiplies output logits", not_built=_MUP, unread=_MUP_UNREAD)
    mup_embedding_mult: float = key(1.0, "Multiplies embeddings", not_built=_MUP)
    mup_rp_embedding_mult: float = key(1.0, "Multiplies relative positions", not_built=_MUP)
    mup_width_scale: int = key(2, "Ratio of the delta model's width to the base model's", not_built=_MUP)
