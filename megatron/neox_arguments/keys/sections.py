"""Declares the sub-keys of keys that are mappings, such as optimizer, zero_optimization and fp16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import REQUIRED, key, new_key

_ALL_USED = "all weights are used"
_FULL_WEIGHTS = "weights are always whole in checkpoints"
_QUANTIZED = "it rounds messages to a few bits; remove it"
_ON_DISK = "nothing is kept on disks"
_BF16_SCALE = "bf16 needs no loss scale"


@dataclass(frozen=True)
class OptimizerParams:
    """The sub-keys of the configuration key `optimizer.params`."""

    lr: float = key(1e-3, "Peak learning rate", ge=0)
    betas: tuple[float, ...] = key(None, "Adam, AdamW, Lion: decay rates; [0.9, 0.999] when unset, Lion [0.9, 0.99]")
    eps: float = key(None, "Adam, AdamW: term added to the denominator; 1e-8 when unset", gt=0)
    momentum: float = key(None, "SGD, Muon: momentum; 0 when unset, Muon 0.95", ge=0)
    nesterov: bool = new_key(None, "Muon: Nesterov's momentum; true when unset")
    ns_steps: int = new_key(None, "Muon: Newton-Schulz iterations; 5 when unset", ge=1, lt=100)
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = new_key(
        None,
        "Muon: learning-rate factor of a matrix, by torch's names. original: sqrt(max(1, rows / columns)); "
        "match_rms_adamw (when unset): 0.2 sqrt(max(rows, columns)), so lr and weight_decay can be AdamW's",
    )
    per_head: bool = new_key(
        None,
        "Muon: orthogonalize each head's queries, keys and values by themselves, as GLM 5's Muon Split; false when "
        "unset",
    )
    adamw_lr: float = new_key(
        None,
        "Muon: peak learning rate for the parameters under AdamW (all but matrices of blocks); lr when unset",
        ge=0,
    )
    weight_decay: float = key(None, "The same as the key weight_decay, where DeepSpeed's files have it", ge=0)
    freeze_step: int = key(400, "OneBitAdam's", no_effect="the other optimizers have no such phase")
    cuda_aware: bool = key(False, "OneBitAdam's", no_effect="the other optimizers send nothing themselves")


@dataclass(frozen=True)
class Optimizer:
    """The sub-keys of the configuration key `optimizer`."""

    type: Literal[
        "Adam", "AdamW", "SGD", "Lion", "Muon", "CPU_Adam", "CPU_Torch_Adam", "OneBitAdam", "SM3", "madgrad_wd"
    ] = key(
        "Adam",
        "Optimizer. Adam is AdamW: weight decay is decoupled, as in GPT-NeoX",
        refuse_values={
            "OneBitAdam": "DeepSpeed 0.19.8 has it for NVIDIA's apex only; use Adam",
            "SM3": "GPT-NeoX's own copy is not here; use Adam, or Adam with use_bnb_optimizer to save memory",
            "madgrad_wd": "GPT-NeoX's own copy is not here; use AdamW",
        },
    )  # fmt: skip
    params: Mapping[str, Any] = key(REQUIRED, "Parameters of the optimizer", section=OptimizerParams)


_DEVICE: dict[str, Any] = {
    "default": "none",
    "meaning": "Device that holds what is offloaded",
    "refuse_values": {"nvme": "checkpoints would lack the parts on disk; write cpu"},
}


@dataclass(frozen=True)
class Trainable:
    """The sub-keys of the configuration key `trainable`."""

    last_layers: int = key(0, "Train this many of the last blocks", ge=0)
    head: bool = key(False, "Train the output layer; if tied, this is the embedding's weight")
    names: tuple[str, ...] | None = key(
        None,
        "Regular expressions, searched in LAYER.NAME with GPT-NeoX's names and layer index (0 the embedding, 2 "
        "the first block, num_layers + 3 the final norm), as '^[45]\\.mlp' or 'layernorm'",
    )
    embedding_gradient: bool = key(
        True,
        "With a tied head: also use the gradient of the embedding, at the cost of a backward pass through all "
        "blocks; false: only the output layer's gradient",
    )


@dataclass(frozen=True)
class Lora:
    """The sub-keys of the configuration key `lora`, with the meanings of peft's LoraConfig."""

    r: int = key(8, "Rank", ge=1)
    alpha: float = key(8, "lora_alpha: adapter output is multiplied by alpha / r", gt=0)
    dropout: float = key(0.0, "lora_dropout: dropout of the adapters' input", ge=0, lt=1)
    target: str | tuple[str, ...] = key(
        "all-linear",
        "target_modules: HuggingFace's module names, LLaMA's (q_proj, k_proj, v_proj, o_proj, up_proj, gate_proj, "
        "down_proj) or GPT-NeoX's (query_key_value, dense, dense_h_to_4h, dense_4h_to_h). A longer name takes one "
        "block (layers.0.self_attn.q_proj). in_proj, x_proj: Mamba's. gate_up_proj: gate and up as one, as in Phi 3 "
        "and GLM 4. Names of latent attention and delta rules: DeepSeek's, Kimi Linear's, Qwen 3-Next's and 3.5's. "
        "all-linear: LLaMA's names if the MLP is gated, else GPT-NeoX's; those of other mixers too",
    )
    rank_pattern: Mapping[str, Any] | None = key(
        None,
        "Ranks that replace r for some modules. A key is a regular expression that matches the end of a module's "
        "name, as in peft: q_proj, or layers.0.self_attn.q_proj (LLaMA's names or GPT-NeoX's); the first match counts",
    )
    alpha_pattern: Mapping[str, Any] | None = key(None, "Numbers that replace alpha, matched as in rank_pattern")
    layers_to_transform: int | tuple[int, ...] | None = key(None, "Blocks with adapters, counted from 0; unset: all")
    rslora: bool = key(False, "use_rslora: multiply by alpha / sqrt(r)")
    dora: bool = key(False, "use_dora: train a magnitude per row; W + alpha / r B A gives the direction")
    init: Literal[True, False, "gaussian"] = key(
        True,
        "init_lora_weights. true: A Kaiming-uniform, B 0; gaussian: A normal with 1 / r, B 0; false: both "
        "Kaiming-uniform, so the first step starts from another model",
    )
    modules_to_save: tuple[str, ...] | None = key(
        None,
        "embed_tokens, lm_head (GPT-NeoX: embed_in, embed_out): train a full copy of the embedding or output "
        "layer, for added tokens. If tied, embed_tokens is both",
    )
    save: Literal["adapter", "both"] = key(
        "adapter", "Contents of checkpoints: only the adapters, or also the base weights"
    )
    quantization: Literal["nf4"] | None = key(
        None,
        "nf4: QLoRA: base weights of the blocks' linears are kept in 4 bits (needs bitsandbytes)",
    )
    double_quant: bool = key(False, "bnb_4bit_use_double_quant: also quantise the scales to 8 bits")
    base: str | None = key(
        None,
        "If `load` is an adapter-only checkpoint: its base weights, a checkpoint or HuggingFace model; unset: "
        "the ones it names",
    )


@dataclass(frozen=True)
class OffloadOptimizer:
    """The sub-keys of the configuration key `zero_optimization.offload_optimizer`."""

    device: Literal["none", "cpu", "nvme"] = key(**_DEVICE)
    pin_memory: bool = key(None, "Keep what is offloaded in page-locked memory; unset: native does, deepspeed does not")
    ratio: float = key(None, "Share of the update done on the CPU", ge=0, le=1)
    nvme_path: str = key(None, "nvme: folder of the files", no_effect=_ON_DISK)
    buffer_count: int = key(None, "nvme: number of buffers", gt=0, no_effect=_ON_DISK)
    fast_init: bool = key(None, "nvme: initialise quickly", no_effect=_ON_DISK)
    pipeline_read: bool = key(None, "nvme: read ahead", no_effect=_ON_DISK)
    pipeline_write: bool = key(None, "nvme: write behind", no_effect=_ON_DISK)


@dataclass(frozen=True)
class OffloadParam:
    """The sub-keys of the configuration key `zero_optimization.offload_param`."""

    device: Literal["none", "cpu", "nvme"] = key(**_DEVICE)
    pin_memory: bool = key(None, "Keep weights in page-locked memory, with engine: deepspeed")
    nvme_path: str = key(None, "nvme: folder of the files", no_effect=_ON_DISK)
    buffer_count: int = key(None, "nvme: number of buffers", gt=0, no_effect=_ON_DISK)
    buffer_size: int = key(None, "nvme: elements of a buffer", gt=0, no_effect=_ON_DISK)
    max_in_cpu: int = key(None, "nvme: elements kept in host memory", gt=0, no_effect=_ON_DISK)


@dataclass(frozen=True)
class ZeroOptimization:
    """The sub-keys of the configuration key `zero_optimization`."""

    stage: int = key(
        0, "Sharded over data-parallel ranks: 0 nothing, 1 optimizer, 2 +gradients, 3 +weights", ge=0, le=3
    )
    allgather_partitions: bool = key(True, "Gather updated weights with all-gather instead of broadcasts")
    allgather_bucket_size: int = key(500_000_000, "Elements gathered at once", gt=0)
    reduce_scatter: bool = key(True, "Average gradients with reduce-scatter instead of all-reduce")
    reduce_bucket_size: int = key(500_000_000, "Elements reduced at once", gt=0)
    overlap_comm: bool = key(None, "Reduce gradients while backward still runs; unset: in stage 3, as DeepSpeed")
    contiguous_gradients: bool = key(False, "Copy gradients to one buffer as they are made")
    round_robin_gradients: bool = key(
        False,
        "Stage 1 and 2: spread gradient copies over the ranks",
        refuse="DeepSpeed 0.19.8 trains other numbers with it, and saves other weights; remove it",
    )
    use_multi_rank_bucket_allreduce: bool = key(True, "Stage 1 and 2: reduce the buckets of several ranks together")
    zero_hpz_partition_size: int = key(
        1,
        "Stage 3: ranks of one machine that keep a copy of the weights (ZeRO++). Native engine: size of "
        "the groups of neighbouring data ranks that shard weights, gradients and states; each group holds a full copy",
        ge=1,
    )
    stage3_use_all_reduce_for_fetch_params: bool = key(False, "Stage 3: fetch weights by all-reduce")
    stage3_allgather_sequential: bool = key(False, "Stage 3: fetch weights one after another")
    stage3_model_persistence_threshold: int = key(
        None, "Stage 3: most elements of small parameters to keep gathered", ge=0
    )
    ignore_unused_parameters: bool = key(True, "Stage 2: allow unused weights", no_effect=_ALL_USED)
    memory_efficient_linear: bool = key(True, "Stage 3: use DeepSpeed's linear", no_effect="linears are ours")
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False, "Stage 3: gather full weights when DeepSpeed saves", no_effect=_FULL_WEIGHTS
    )
    stage3_gather_fp16_weights_on_model_save: bool = key(
        False, "Old name of stage3_gather_16bit_weights_on_model_save", no_effect=_FULL_WEIGHTS
    )
    elastic_checkpoint: bool = key(
        False, "Let DeepSpeed load a checkpoint on another number of ranks", no_effect=_FULL_WEIGHTS
    )
    zero_quantized_weights: bool = key(False, "ZeRO++", refuse=_QUANTIZED)
    zero_quantized_gradients: bool = key(False, "ZeRO++", refuse=_QUANTIZED)
    sub_group_size: int = key(1_000_000_000, "Stage 3: parameters updated at once", gt=0)
    stage3_prefetch_bucket_size: int = key(50_000_000, "Stage 3: elements fetched ahead", ge=0)
    stage3_param_persistence_threshold: int = key(100_000, "Stage 3: smaller parameters stay whole", ge=0)
    stage3_max_live_parameters: int = key(1_000_000_000, "Stage 3: parameters resident before release", ge=0)
    stage3_max_reuse_distance: int = key(
        1_000_000_000, "Stage 3: do not release a parameter that is used again within this many parameters", ge=0
    )
    load_from_fp32_weights: bool = key(
        True, "Take master weights from checkpoints", no_effect="they are read with the optimizer's state"
    )
    cpu_offload: bool = key(False, "Old spelling of offload_optimizer: {device: cpu}")
    offload_optimizer: Mapping[str, Any] | None = key(None, "Optimizer states off the device", section=OffloadOptimizer)
    offload_param: Mapping[str, Any] | None = key(None, "Stage 3: weights off the device", section=OffloadParam)


@dataclass(frozen=True)
class Fp16:
    """The sub-keys of the configuration key `fp16`."""

    enabled: bool = key(None, "Train in fp16; true when `precision: fp16`")
    fp16: bool = key(True, "Written by many GPT-NeoX files", no_effect="`enabled` decides")
    type: Literal["fp16", "bfloat16"] = key("fp16", "Written by many GPT-NeoX files", no_effect="`enabled` decides")
    auto_cast: bool = key(False, "Cast inputs to fp16", no_effect="inputs are token numbers")
    loss_scale: float = key(0.0, "Fixed loss scale; 0 for dynamic scaling", ge=0)
    initial_scale_power: int = key(16, "Dynamic scaling starts at 2 to this power", ge=0)
    loss_scale_window: int = key(1000, "Steps without overflow before the scale is doubled", gt=0)
    hysteresis: int = key(2, "Overflows before the scale is halved", ge=1)
    consecutive_hysteresis: bool = key(False, "Refill the hysteresis at every step without overflow")
    min_loss_scale: float = key(1.0, "Dynamic scaling never goes below", gt=0)


@dataclass(frozen=True)
class Bf16:
    """The sub-keys of the configuration key `bf16`."""

    enabled: bool = key(None, "Train in bf16; true when `precision: bfloat16`")
    bf16: bool = key(True, "Written by some GPT-NeoX files", no_effect="`enabled` decides")
    type: Literal["bfloat16"] = key("bfloat16", "Written by some GPT-NeoX files", no_effect="`enabled` decides")
    loss_scale: float = key(0.0, "As in fp16", no_effect=_BF16_SCALE)
    initial_scale_power: int = key(0, "As in fp16", no_effect=_BF16_SCALE)
    loss_scale_window: int = key(1000, "As in fp16", no_effect=_BF16_SCALE)
    hysteresis: int = key(2, "As in fp16", no_effect=_BF16_SCALE)
    min_loss_scale: float = key(1.0, "As in fp16", no_effect=_BF16_SCALE)


@dataclass(frozen=True)
class DataTypes:
    """The sub-keys of the configuration key `data_types`."""

    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = key(
        "fp32",
        "Number type in which gradients are summed",
        no_effect="gradients are summed in fp32, in which small terms are not lost",
    )


@dataclass(frozen=True)
class CurriculumSchedule:
    """The sub-keys of the configuration key `curriculum_learning.schedule_config`."""

    total_curriculum_step: int = key(None, "fixed_linear, fixed_root: iterations until max_difficulty", gt=0)
    difficulty_step: int = key(None, "fixed_linear, fixed_root: lengths are multiples of this", gt=0)
    root_degree: int = key(None, "fixed_root: degree of the root", gt=0)
    difficulty: tuple[int, ...] = key(None, "fixed_discrete: the lengths, in tokens")
    max_step: tuple[int, ...] = key(None, "fixed_discrete: last iteration of each length, without the last length")


@dataclass(frozen=True)
class CurriculumLearning:
    """The sub-keys of the configuration key `curriculum_learning`, with the names and formulas of DeepSpeed's
    legacy curriculum learning."""

    enabled: bool = key(False, "Train on shorter sequences first")
    curriculum_type: Literal["seqlen"] = key("seqlen", "The growing quantity: the length of sequences")
    min_difficulty: int = key(None, "First length, in tokens", ge=1)
    max_difficulty: int = key(None, "Last length, in tokens: seq_length", ge=1)
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] = key(
        "fixed_linear", "Growth of the length: linear, by a root of the iteration, or in listed steps"
    )
    schedule_config: Mapping[str, Any] = key(None, "The numbers of schedule_type", section=CurriculumSchedule)


@dataclass(frozen=True)
class SeqCurriculum:
    """The sub-keys of the configuration key `seq_curriculum`."""

    seq_len: tuple[int, ...] = key(REQUIRED, "Lengths of the phases; each divides seq_length")
    until: tuple[int, ...] = key(REQUIRED, "Last iteration of each phase but the last")


@dataclass(frozen=True)
class BranchedFrom:
    """The sub-keys of the configuration key `branched_from`."""

    run: str = key(REQUIRED, "The parent's folder of checkpoints")
    iteration: int = key(REQUIRED, "Step of the parent at which the branch begins", ge=0)
    digest: str = key(REQUIRED, "SHA-256 of that checkpoint's manifest.json")
    data: Literal["continued", "replanned", "restarted"] = key(
        REQUIRED,
        "continued: the parent's data, in its order. replanned: another mix, whose sets go on after the samples they "
        "gave. restarted: other data, from their sample 0",
    )
    changed: Mapping[str, Any] | None = key(None, "Keys that differ from the parent's: [old value, new value]")
    parent: Mapping[str, Any] | None = key(None, "The parent's own branched_from, if it is a branch")


@dataclass(frozen=True)
class WeightSchedule:
    """The sub-keys of the configuration key `train_data_weight_schedule`."""

    weights: tuple[tuple[float, ...], ...] = key(REQUIRED, "Weights of train_data_paths in each phase; 0: not drawn")
    until: tuple[int, ...] = key(REQUIRED, "Last iteration of each phase but the last")


@dataclass(frozen=True)
class CommsLogger:
    """The sub-keys of the configuration key `comms_logger`."""

    enabled: bool = key(False, "Record collectives")
    verbose: bool = key(False, "Print every collective")
    prof_all: bool = key(True, "Record all kinds of collectives")
    debug: bool = key(False, "Also log the function that calls each collective")
    prof_ops: tuple[str, ...] = key((), "Kinds to record, with prof_all false")


@dataclass(frozen=True)
class RopeScaling:
    """The sub-keys of the configuration key `rope_scaling`, by HuggingFace's names."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = key(
        REQUIRED, "Method that stretches rotary positions to longer sequences"
    )
    factor: float = key(
        None, "Factor by which sequences become longer; longrope: derived from max_position_embeddings", ge=1
    )
    original_max_position_embeddings: int = key(
        None, "Sequence length with which the model was trained before stretching", ge=1
    )
    low_freq_factor: float = key(
        None, "llama3: waves longer than original_max_position_embeddings / this are stretched by factor", gt=0
    )
    high_freq_factor: float = key(
        None, "llama3: waves shorter than original_max_position_embeddings / this stay as they are", gt=0
    )
    beta_fast: float = key(
        None, "yarn: frequencies with more turns than this in the original length stay as they are; unset: 32", gt=0
    )
    beta_slow: float = key(
        None,
        "yarn: frequencies with fewer turns than this in the original length are divided by factor; unset: 1",
        gt=0,
    )
    attention_factor: float = key(
        None,
        "yarn, longrope: multiplies the tables; unset: 0.1 ln(factor) + 1; longrope: sqrt(1 + ln(factor) / "
        "ln(original)) with factor max_position_embeddings / original",
        gt=0,
    )
    mscale: float = key(
        None,
        "yarn, as in DeepSeek's models: with mscale_all_dim and without attention_factor, the tables are multiplied by "
        "(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)",
        gt=0,
    )
    mscale_all_dim: float = key(None, "yarn: see mscale", gt=0)
    truncate: bool = key(None, "yarn: round the ends of the ramp to whole dimensions; unset: true; gpt-oss: false")
    short_factor: tuple[float, ...] = key(
        None, "longrope: divisor of each frequency in texts up to the original length", gt=0
    )
    long_factor: tuple[float, ...] = key(None, "longrope: the same for longer texts", gt=0)
    partial_rotary_factor: float = key(
        None,
        "proportional: the share of each head's pairs that turn, those of high frequency; the others stand still. "
        "Gemma 4",
        gt=0,
        le=1,
    )
    llama_4_scaling_beta: float = key(
        None, "yarn: queries at position p are multiplied by 1 + beta ln(1 + floor(p / original)); Ministral 3", gt=0
    )
