"""The part of a configuration that the model is built from."""

from dataclasses import dataclass

from megatron.neox_arguments.frozen import as_tuple
from megatron.neox_arguments.keys.adapters import AdapterKeys
from megatron.neox_arguments.keys.architectures import (
    DeltaRuleKeys,
    LatentAttentionKeys,
    MambaKeys,
    MoEKeys,
    MultiTokenPredictionKeys,
    MuPKeys,
    OtherArchitectureKeys,
    ShortConvKeys,
    TransformerEngineKeys,
)
from megatron.neox_arguments.keys.fp8 import FP8Keys
from megatron.neox_arguments.keys.model import ModelKeys, PrecisionKeys
from megatron.neox_arguments.keys.parallel import ParallelKeys
from megatron.neox_arguments.origins import Origins
from megatron.neox_arguments.values.ffn_width import GATED, ffn_width

# Kinds of attention_config: with a delta rule; with a mixer and a feed-forward; with attention; with states.
DELTA_BLOCKS = ("gated_delta_net", "kimi_delta_attention")
FULL_BLOCKS = ("global", "flash", *DELTA_BLOCKS, "short_conv", "mamba2_mlp")
ATTENTION_BLOCKS = ("global", "flash", "attention")
MAMBA_2_BLOCKS = ("mamba2", "mamba2_mlp")
MAMBA_BLOCKS = ("mamba", *MAMBA_2_BLOCKS)
STATE_BLOCKS = (*MAMBA_BLOCKS, *DELTA_BLOCKS, "short_conv")


@dataclass(frozen=True)
class ModelArgs(
    AdapterKeys, OtherArchitectureKeys, ShortConvKeys, DeltaRuleKeys, MambaKeys, LatentAttentionKeys, MoEKeys, MuPKeys,
    MultiTokenPredictionKeys, TransformerEngineKeys, FP8Keys, PrecisionKeys, ModelKeys, ParallelKeys, Origins,
):  # fmt: skip
    """The keys that decide a model's parameters and forward pass, and properties computed from them.

    Each `NeoXArgs` is one. A function that takes `ModelArgs` reads none of the other keys: mypy checks it.
    """

    @property
    def pp(self) -> int:
        """The number of pipeline ranks, at least 1."""
        return max(1, self.pipe_parallel_size)

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages that each pipeline rank holds, at least 1."""
        if self.pp == 1 or self.pipeline_schedule == "1f1b":
            return 1
        return self.virtual_pipeline_stages or (1 if self.pipeline_schedule == "zero_bubble" else 2)

    @property
    def is_v_pipeline(self) -> bool:
        """Whether stages go from the first pipeline rank to the last and back, so that the first holds both
        ends of the model."""
        return self.pp > 1 and self.pipeline_schedule in ("zbv", "dualpipev")

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether the pipeline schedule computes weight gradients apart from the rest of a backward pass."""
        return self.pp > 1 and self.pipeline_schedule in ("zero_bubble", "zbv", "dualpipev")

    @property
    def ulysses_size(self) -> int:
        """The number of neighbouring context ranks that exchange heads for columns in attention; 1: none."""
        if self.context_parallel_size == 1 or self.context_parallel_type == "ulysses":
            return self.context_parallel_size
        return self.context_parallel_ulysses_size

    @property
    def tp(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.model_parallel_size

    @property
    def fp8_blocks(self) -> range:
        """The blocks, counted from 0, whose linear layers use FP8 if FP8 is on."""
        if not self.first_last_layers_bf16:
            return range(self.num_layers)
        return range(self.num_layers_at_start_in_bf16, self.num_layers - self.num_layers_at_end_in_bf16)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation in GATED

    @property
    def ffn_size(self) -> int | tuple[int, ...]:
        """The inner width of the MLP, a tuple with one for each layer if they differ.

        A gated MLP has as many gate rows as up rows.
        """
        return ffn_width(self)

    def has_experts(self, block: int) -> bool:
        """Whether the feed-forward of block number `block`, counted from 0, is a mixture of experts."""
        kind = self.attention_config[block]
        if self.moe_num_experts == 1 or kind not in FULL_BLOCKS:
            return kind == "moe"
        if self.moe_layer_freq is not None:
            return self.moe_layer_freq[block] == 1
        return block % self.moe_expert_interval == 0

    @property
    def has_dense_blocks(self) -> bool:
        """Whether the feed-forward of any block is dense."""
        return any(self.has_dense(block) for block in range(self.num_layers))

    def has_dense(self, block: int) -> bool:
        """Whether block number `block`, counted from 0, has a dense feed-forward."""
        kind = self.attention_config[block]
        return kind == "mlp" or (kind in FULL_BLOCKS and not self.has_experts(block))

    @property
    def attends(self) -> bool:
        """Whether any block has attention."""
        return any(kind in ATTENTION_BLOCKS for kind in self.attention_config)

    @property
    def rotary_width(self) -> int:
        """The number of a head's dimensions that rotary positions rotate; odd numbers are refused."""
        if self.kv_lora_rank is not None:
            return self.qk_rope_head_dim or 0
        return int(self.head_dim * self.rotary_pct)

    def has_window(self, block: int) -> bool:
        """Whether attention of block number `block`, counted from 0, has `sliding_window_width`."""
        slides = self.layer_types is None or self.layer_types[block] == "sliding_attention"
        return slides and self.sliding_window_width is not None

    def head_dim_of(self, block: int) -> int:
        """The width of an attention head of block number `block`, counted from 0."""
        return self.head_dim if self.global_head_dim is None or self.has_window(block) else self.global_head_dim

    @property
    def mamba_blocks(self) -> tuple[int, ...]:
        """The blocks, counted from 0, that are Mamba or Mamba 2."""
        return tuple(i for i, kind in enumerate(self.attention_config) if kind in MAMBA_BLOCKS)

    @property
    def state_blocks(self) -> tuple[int, ...]:
        """The blocks, counted from 0, whose mixer has a state: Mamba, Mamba 2, delta rules."""
        return tuple(i for i, kind in enumerate(self.attention_config) if kind in STATE_BLOCKS)

    @property
    def mamba_inner_size(self) -> int:
        """The channels of Mamba's mixers."""
        return self.mamba_expand * self.hidden_size

    @property
    def mamba2_heads(self) -> int:
        """The heads of Mamba 2's mixers."""
        return self.mamba_num_heads or self.mamba_inner_size // self.mamba_head_dim

    @property
    def expert_ffn_size(self) -> int:
        """The inner width of an expert: moe_intermediate_size, else intermediate_size, else GPT-NeoX's
        formula from hidden_size."""
        if self.moe_intermediate_size is not None:
            return self.moe_intermediate_size
        if self.intermediate_size is not None:
            return as_tuple(self.intermediate_size)[0]
        width = int(8 * self.hidden_size / 3) if self.is_gated else 4 * self.hidden_size
        return -(-width // 256) * 256

    @property
    def router_scores(self) -> str:
        """The function that turns a router's logits into scores of experts: softmax or sigmoid."""
        one_of_sinkhorn = self.moe_router_type == "sinkhorn" and self.moe_top_k == 1
        return self.moe_router_score_function or ("sigmoid" if one_of_sinkhorn else "softmax")

    @property
    def rotates_by_length(self) -> bool:
        """Whether rotary frequencies depend on the length of the text (dynamic NTK, LongRoPE)."""
        scaling = self.rope_scaling if self.pos_emb == "rotary" else None
        return scaling is not None and scaling["rope_type"] in ("dynamic", "longrope")

    @property
    def kv_heads(self) -> int | tuple[int, ...]:
        """The number of key-value heads, a tuple with one for each layer where they differ."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def lora_dropout(self) -> float:
        """The dropout of the adapters' input."""
        return 0.0 if self.lora is None or self.disable_dropout else self.lora["dropout"]

    @property
    def quantized(self) -> bool:
        """Whether the linears of blocks hold their weights, below adapters, in 4 bits."""
        return self.lora is not None and self.lora["quantization"] is not None

    @property
    def softmax_rows(self) -> int | None:
        """The number of leading vocabulary rows in the softmax; None: all.

        It is known once training has resolved `mask_padded_vocab: auto` or `true`.
        """
        rows = self.mask_padded_vocab
        return None if isinstance(rows, bool | str) else rows

    @property
    def params_dtype(self) -> str:
        """The precision of parameters and activations: fp32, fp16 or bf16."""
        return {"bfloat16": "bf16"}.get(self.precision, self.precision)


_TRAINING_SECTIONS = (AdapterKeys, FP8Keys, PrecisionKeys, ParallelKeys, Origins)
# The sections of keys that define the model's function.
MODEL_SECTIONS = tuple(section.__name__ for section in ModelArgs.__bases__ if section not in _TRAINING_SECTIONS)
