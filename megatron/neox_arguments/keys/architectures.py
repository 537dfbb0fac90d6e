"""Keys of Transformer-Engine's layers, of mixtures of experts, and of features that are not built yet or that
GPT-NeoX had and that do not come here."""

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
    """Transformer-Engine's layers, under its names on disk."""

    te_backend: Literal["auto", "native", "transformer_engine"] = new_key(
        "auto",
        "Whose kernels compute FP8 products and norms; native: torch's; transformer_engine: that package's, not in "
        "compiled blocks; auto: its products for precision_fp8: te where it works, on GPUs that they have run on (none "
        "so far), else native. The layers, and their names on disk with te_mha and te_layernorm_mlp, are our own with "
        "either",
    )
    te_mha: bool = key(False, "Transformer-Engine's attention")
    te_layernorm_mlp: bool = key(False, "Transformer-Engine's MLP, which holds the norm before it")
    te_columnparallel: bool = key(False, "Transformer-Engine's column-parallel linears", no_effect=_SAME_LINEARS)
    te_rowparallel: bool = key(False, "Transformer-Engine's row-parallel linears", no_effect=_SAME_LINEARS)


@dataclass(frozen=True)
class MoEKeys:
    """Mixture of experts."""

    moe_num_experts: int = key(1, "Experts of a feed-forward; 1: it is dense", ge=1)
    moe_expert_interval: int = key(1, "Every this many blocks have experts, the first of them among these", ge=1)
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
        "Numbers of a token that experts read and write, between two linears that all experts share, as in Nemotron 3; "
        "unset: hidden_size, without these",
        ge=1,
    )
    moe_shared_expert_intermediate_size: int | None = new_key(
        None, "Inner width of a feed-forward beside the experts that all tokens go through; unset: there is none", ge=1
    )
    moe_shared_expert_gate: bool = new_key(
        False, "The shared expert's output is multiplied by the sigmoid of a trained gate, as in Qwen 2 MoE"
    )
    moe_top_k: int = key(1, "Experts a token goes to", ge=1)
    moe_router_type: Literal["sinkhorn", "topk"] = key(
        "sinkhorn",
        "How tokens find experts: the moe_top_k best of each, or (sinkhorn, in training) of scores that are balanced "
        "over the tokens of a micro-batch first",
        differs="sinkhorn balances without padding, and never waits for the device",
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = new_key(
        None, "Scores of experts from the router's logits; unset: softmax, and sigmoid for sinkhorn with moe_top_k 1"
    )
    norm_topk_prob: bool = new_key(False, "The scores of a token's experts are divided by their sum")
    moe_router_topk_scaling_factor: float = new_key(1.0, "Scores of a token's experts are multiplied by this", gt=0)
    moe_router_num_groups: int | None = new_key(
        None, "Groups of neighbouring experts, of which a token takes moe_router_group_topk; unset: one", ge=1
    )
    moe_router_group_topk: int | None = new_key(
        None, "Groups that a token's experts may be of: those whose two best scores sum to most", ge=1
    )
    moe_router_bias: bool = new_key(False, "The router's logits have a trained bias, as in gpt-oss")
    moe_expert_bias: bool = new_key(False, "The linears of experts have biases, as in gpt-oss")
    moe_router_bias_update_rate: float | None = new_key(
        None,
        "Balance without a loss (arXiv 2408.15664): each expert has a bias that counts where experts are chosen, and "
        "every step raises or lowers it by this; unset: there is none",
        ge=0,
    )
    moe_aux_loss_coeff: float = new_key(
        0.0, "Factor of the load-balancing loss (Switch Transformer, arXiv 2101.03961), which balances experts", ge=0
    )
    moe_aux_loss_scope: Literal["micro_batch", "sequence", "step", "transformers"] = new_key(
        "micro_batch",
        "Tokens over which the load-balancing loss takes shares and scores, a layer at a time and summed over layers: "
        "a rank's micro-batch, each row, or all of a step (one forward pass more); transformers: a micro-batch and all "
        "layers together, times moe_top_k, as there",
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
        None, "topk: the router's input is multiplied by random numbers within 1 +- this in training", ge=0, lt=1
    )
    moe_expert_capacity_factor: float | None = new_key(
        None,
        "An expert takes at most this times the mean number of tokens of an expert in a rank's micro-batch; those with "
        "the lowest scores are dropped, and counted. Unset: none is dropped",
        gt=0,
    )
    moe_expert_tensor_parallel: Literal["whole", "cut"] = new_key(
        "whole", "Tensor-parallel ranks share out the experts (GPT-NeoX), or each has a slice of every one"
    )
    expert_parallel_size: int = new_key(
        1,
        "Data-parallel ranks over which the experts of a model are shared out; tokens travel between them. They are "
        "neighbours, and divide the data-parallel size; engine native alone",
        ge=1,
    )
    expert_parallel_across_nodes: bool = new_key(
        False, "Let tokens travel between machines; networks have been seen to hang under such traffic"
    )


@dataclass(frozen=True)
class MambaKeys:
    """Mamba and Mamba 2, the blocks `mamba` and `mamba2` of attention_config."""

    mamba_selective_scan_fusion: bool = key(False, "Fused scan", no_effect=_MAMBA_KERNELS)
    mamba_causal_conv_fusion: bool = key(False, "Fused convolution", no_effect=_MAMBA_KERNELS)
    mamba_inner_func_fusion: bool = key(False, "Fused mixer", no_effect=_MAMBA_KERNELS)
    mamba_selective_fp32_params: bool = key(
        True,
        "A_log and D are fp32 beside 16-bit weights, as the recurrence wants them; engine native. DeepSpeed has one "
        "type for all, and fp32 masters: there they are rounded where they are read, which is printed",
    )
    mamba_use_bias_in_conv: bool = key(True, "Bias of the convolution")
    mamba_use_bias_in_linears: bool = key(False, "Biases of in_proj, out_proj and (Mamba 1) x_proj")
    mamba_backend: Literal["auto", "torch", "mamba_ssm", "fla"] = new_key(
        "auto",
        "Kernels of scans and convolutions. torch: its own operations; mamba_ssm: that package, with causal-conv1d "
        "where it is installed; fla: flash-linear-attention, for Mamba 2; auto: the first of mamba_ssm and fla that is "
        "installed and can do the run, on GPUs that it has run on (none so far), else torch; printed",
    )
    mamba_state_dim: int | None = new_key(
        None, "Numbers of the state of a channel (Mamba 2: of a head's), N; unset: 16, Mamba 2: 128", ge=1
    )
    mamba_expand: int = new_key(2, "Channels of a mixer, in units of hidden_size", ge=1)
    mamba_conv_kernel: int = new_key(4, "Tokens that the causal convolution sees, its own among them", ge=1)
    mamba_dt_rank: int | None = new_key(
        None, "Mamba 1: rank of the projection of time steps; unset: hidden_size / 16, rounded up", ge=1
    )
    mamba_bcdt_norm_epsilon: float | None = new_key(
        None, "Mamba 1: B, C and time steps go through RMS norms without weights, as in Falcon-Mamba; unset: none", gt=0
    )
    mamba_num_heads: int | None = new_key(
        None, "Mamba 2: heads; unset: mamba_expand x hidden_size / mamba_head_dim", ge=1
    )
    mamba_head_dim: int = new_key(64, "Mamba 2: channels of a head", ge=1)
    mamba_num_groups: int = new_key(8, "Mamba 2: groups of heads that share B, C and the gated norm's mean", ge=1)
    mamba_chunk_size: int = new_key(
        256, "Mamba 2: tokens of a chunk of the scan; changes no number but by rounding", ge=1
    )
    mamba_time_step_limit: tuple[float, ...] | None = new_key(
        None, "Mamba 2: [low, high] or [low] that time steps are clamped to; unset: they are not", ge=0
    )
    mamba_state_fp32: bool = new_key(
        True,
        "The state, in scans and from token to token, is fp32 whatever the weights are, which long documents need; "
        "false: in their type, with less memory",
    )


@dataclass(frozen=True)
class OtherArchitectureKeys:
    """RWKV, gMLP and soft prompts."""

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
    mup_attn_temp: float = key(1.0, "Multiplies attention logits", later=_MUP, unread=_MUP_UNREAD)
    mup_output_temp: float = key(1.0, "Multiplies output logits", later=_MUP, unread=_MUP_UNREAD)
    mup_embedding_mult: float = key(1.0, "Multiplies embeddings", later=_MUP)
    mup_rp_embedding_mult: float = key(1.0, "Multiplies relative positions", later=_MUP)
    mup_width_scale: int = key(2, "Width of the delta model over the base model's", later=_MUP)
