"""The sub-keys of the keys that are mappings: optimizer, zero_optimization, fp16, bf16, data_types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import REQUIRED, key, new_key

_ALL_USED = "all weights are used"
_OUR_FILES = "weights are always whole in checkpoints"
_QUANTIZED = "it rounds what is sent to a few bits; remove it"
_ON_DISK = "nothing is kept on disks"
_BF16_SCALE = "bf16 needs no loss scale"


@dataclass(frozen=True)
class OptimizerParams:
    """The sub-keys of `optimizer.params`."""

    lr: float = key(1e-3, "Peak learning rate", ge=0)
    betas: tuple[float, ...] = key(None, "Adam, AdamW, Lion: decay rates; [0.9, 0.999] when unset, Lion [0.9, 0.99]")
    eps: float = key(None, "Adam, AdamW: term added to the denominator; 1e-8 when unset", gt=0)
    momentum: float = key(None, "SGD, Muon: momentum; 0 when unset, Muon 0.95", ge=0)
    nesterov: bool = new_key(None, "Muon: Nesterov's momentum; true when unset")
    ns_steps: int = new_key(None, "Muon: Newton-Schulz iterations; 5 when unset", ge=1, lt=100)
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = new_key(
        None,
        "Muon: factor of a matrix's learning rate, as torch names it; original: sqrt(max(1, rows / columns)); "
        "match_rms_adamw (when unset): 0.2 sqrt(max(rows, columns)), so that lr and weight_decay may be AdamW's",
    )
    adamw_lr: float = new_key(
        None, "Muon: peak learning rate of what AdamW updates (all but the matrices of blocks); lr when unset", ge=0
    )
    weight_decay: float = key(None, "DeepSpeed's place for weight_decay", ge=0)
    freeze_step: int = key(400, "OneBitAdam's", no_effect="the other optimizers have no such phase")
    cuda_aware: bool = key(False, "OneBitAdam's", no_effect="the other optimizers send nothing themselves")


@dataclass(frozen=True)
class Optimizer:
    """The sub-keys of `optimizer`."""

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
    "meaning": "Where it is kept",
    "refuse_values": {"nvme": "checkpoints would lack what is on disks; write cpu"},
}


@dataclass(frozen=True)
class Trainable:
    """The sub-keys of `trainable`."""

    last_layers: int = key(0, "All of the last blocks, so many", ge=0)
    head: bool = key(False, "The output layer; of a tied one the embedding's weight, which it is")
    names: tuple[str, ...] | None = key(
        None,
        "Regular expressions, searched in LAYER.NAME with GPT-NeoX's layer index (0 the embedding, 2 the first block, "
        "num_layers + 3 the final norm) and names, as '^[45]\\.mlp' or 'layernorm'",
    )
    embedding_gradient: bool = key(
        True,
        "Of a tied head: also the gradient of its use as embedding, for which all blocks run backwards; false: that of "
        "the output layer alone",
    )


@dataclass(frozen=True)
class Distillation:
    """The sub-keys of `distillation`, by the names of TRL's GKD where it has them."""

    teacher: str = key(
        REQUIRED,
        "The model that is learned from: a checkpoint of any layout, with the same tokenizer, or a HuggingFace model "
        "(a folder, or hf://ORG/NAME)",
    )
    beta: float = key(
        0.0,
        "Divergence of each trained token: 0: KL(teacher || student); 1: KL(student || teacher); between them the "
        "generalised Jensen-Shannon divergence",
        ge=0,
        le=1,
    )
    temperature: float = key(
        1.0, "Divides the logits of both; the divergence is not multiplied by its square, as in TRL", gt=0
    )
    weight: float = key(
        1.0, "Of the divergence in the loss; 1 - weight is that of the labels' negative log-likelihood", gt=0, le=1
    )
    top_k: int | None = key(
        None, "Compare the teacher's most likely tokens, so many, and all others as one outcome; unset: all", ge=1
    )
    cache: bool = key(
        False,
        "Ask the teacher for all rows of the run before the first step, and keep its top_k tokens on disk, by teacher "
        "and content; it is not there while the model trains",
    )
    lmbda: float = key(
        0.0,
        "Share of the steps that are on policy (GKD): the student writes the answers to the prompts of the step, at "
        "the same temperature, and the loss is the divergence there; with labels, and pack_impl: unpacked",
        ge=0,
        le=1,
    )
    max_new_tokens: int = key(128, "lmbda: tokens of an answer at most", ge=1)
    cache_dir: str | None = key(None, "cache: folder, for all runs; unset: teacher_cache beside the index maps")


@dataclass(frozen=True)
class Rollout:
    """The sub-keys of `rollout`, by TRL's names where it has them."""

    prompts: tuple[str, ...] = key(
        REQUIRED,
        'Files of prompts, one a line: {"prompt": text, or messages for the chat template, ...}; the other fields are '
        "handed to reward_functions",
    )
    prompt_key: str = key("prompt", "The field that holds the prompt")
    chat: bool = key(False, "Texts are a user's words, which go through the chat template; else they stand as they are")
    num_generations: int = key(
        8, "Answers to each prompt; train_batch_size counts answers, with train_impl dpo prompts", ge=1
    )
    judge: str | None = key(
        None,
        "train_impl dpo, in place of rewards: FILE.py:NAME of a function that compares two answers: judge(prompts, "
        "completions), of pairs of texts, gives for each 0 (the first is better), 1, or -1 or None (neither)",
    )
    missing_eos_penalty: float | None = key(
        None, "Is taken from the reward of an answer that did not end; unset: nothing", gt=0
    )
    max_completion_length: int = key(256, "Tokens of an answer at most; it ends with the row of seq_length too", ge=1)
    max_prompt_length: int | None = key(
        None, "Tokens that are used of a prompt; a longer one loses its beginning. Unset: it is refused", ge=1
    )
    temperature: float = key(
        1.0,
        "Divides the logits in sampling, and in the losses of train_impl reinforce; 0: the likeliest tokens, and 1 in "
        "the loss",
        ge=0,
    )
    steps_per_generation: int = key(
        1, "Optimizer steps that the answers written at a time are shared out to, train_batch_size a step", ge=1
    )
    num_iterations: int = key(1, "Times that these steps are taken", ge=1)
    exact: bool = key(
        False,
        "Sample by the forward pass of training, a whole row a token, so that both have the same log-probabilities, "
        "bit for bit; slow",
    )
    logprob_bound: float = key(
        0.1,
        "The run ends when the log-probabilities of sampler and trainer differ by more than this, in the mean over the "
        "tokens of a step, with train_impl dpo of the first step of a generation; 0: never",
        ge=0,
    )
    servers: tuple[str, ...] | None = key(
        None,
        "Addresses (http://HOST:PORT) of servers that write the answers, and are given the weights of each generation "
        "before; data ranks share them out. NEOX_SERVE_TOKEN is shown to them. Unset: the training processes write",
    )
    server_api: Literal["openai", "vllm", "sglang"] = key(
        "openai",
        "What servers speak: openai: tools/serve.py (serve_weight_updates: true); vllm: vLLM's, with "
        "VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs; sglang: SGLang's",
    )
    server_timeout_s: float = key(
        600.0,
        "Seconds that a server may take for an answer or for new weights; a server that cannot be reached is tried "
        "again for so long",
        gt=0,
    )
    sync: str | None = key(
        None,
        "Folder, which servers see under the same name, of the weights for them, in HuggingFace's format, those of a "
        "generation in a folder RUN_ID/NUMBER of it; the last ones stay. Unset: rollout_weights in save",
    )
    staleness: int = key(
        0,
        "servers: answers are asked for so many generations ahead, while training goes on, so that they are written "
        "with weights of so many generations before. rl_importance_cap weighs the difference, logprob_bound sees it",
        ge=0,
    )
    environment: str | None = key(
        None,
        "FILE.py:CLASS whose instances answer the model, turn by turn, by reset(prompt, seed, **columns) and "
        "step(completion); what they say is not trained, what they give is a part of the reward",
    )
    environment_workers: int = key(16, "environment: calls of reset and step that run at a time", ge=1)
    max_turns: int = key(8, "environment: turns of the model in a conversation at most", ge=1)
    shuffle: bool = key(True, "Take the prompts in another random order in each pass; false: as they stand")


@dataclass(frozen=True)
class Lora:
    """The sub-keys of `lora`, with the meanings of peft's LoraConfig."""

    r: int = key(8, "Rank", ge=1)
    alpha: float = key(8, "lora_alpha: the adapters' output is multiplied by alpha / r", gt=0)
    dropout: float = key(0.0, "lora_dropout: of the adapters' input", ge=0, lt=1)
    target: str | tuple[str, ...] = key(
        "all-linear",
        "target_modules: names of HuggingFace's modules, LLaMA's (q_proj, k_proj, v_proj, o_proj, up_proj, gate_proj, "
        "down_proj) or GPT-NeoX's (query_key_value, dense, dense_h_to_4h, dense_4h_to_h); gate_up_proj: both as one, "
        "as Phi 3 and GLM 4 have them; all-linear: those of LLaMA where the MLP is gated, else of GPT-NeoX",
    )
    rslora: bool = key(False, "use_rslora: multiply by alpha / sqrt(r)")
    dora: bool = key(False, "use_dora: a trained magnitude for each row of W + alpha / r B A, and that as direction")
    init: Literal[True, False, "gaussian"] = key(
        True,
        "init_lora_weights: true: A Kaiming-uniform, B 0; gaussian: A normal with 1 / r, B 0; false: both Kaiming-"
        "uniform, so that the first step is another model's",
    )
    modules_to_save: tuple[str, ...] | None = key(
        None,
        "embed_tokens, lm_head (GPT-NeoX: embed_in, embed_out): a copy of the embedding, of the output layer, is "
        "trained whole, for tokens that were added; of a tied one embed_tokens is both",
    )
    save: Literal["adapter", "both"] = key(
        "adapter", "What checkpoints hold: the adapters, or the weights below them too"
    )
    quantization: Literal["nf4"] | None = key(
        None,
        "nf4: QLoRA: the linears of blocks hold their weights, below adapters, in 4 bits (needs bitsandbytes)",
    )
    double_quant: bool = key(False, "quantization: bnb_4bit_use_double_quant: its scales are quantised too, to 8 bits")
    base: str | None = key(
        None,
        "Where `load` is a checkpoint of adapters alone: the weights below them, a checkpoint or HuggingFace's; unset: "
        "where that says they were",
    )


@dataclass(frozen=True)
class OffloadOptimizer:
    """The sub-keys of `zero_optimization.offload_optimizer`."""

    device: Literal["none", "cpu", "nvme"] = key(**_DEVICE)
    pin_memory: bool = key(None, "In page-locked memory")
    ratio: float = key(None, "Share of the update done on the CPU", ge=0, le=1)
    nvme_path: str = key(None, "nvme: folder of the files", no_effect=_ON_DISK)
    buffer_count: int = key(None, "nvme: buffers", gt=0, no_effect=_ON_DISK)
    fast_init: bool = key(None, "nvme: initialise quickly", no_effect=_ON_DISK)
    pipeline_read: bool = key(None, "nvme: read ahead", no_effect=_ON_DISK)
    pipeline_write: bool = key(None, "nvme: write behind", no_effect=_ON_DISK)


@dataclass(frozen=True)
class OffloadParam:
    """The sub-keys of `zero_optimization.offload_param`."""

    device: Literal["none", "cpu", "nvme"] = key(**_DEVICE)
    pin_memory: bool = key(None, "In page-locked memory")
    nvme_path: str = key(None, "nvme: folder of the files", no_effect=_ON_DISK)
    buffer_count: int = key(None, "nvme: buffers", gt=0, no_effect=_ON_DISK)
    buffer_size: int = key(None, "nvme: elements of a buffer", gt=0, no_effect=_ON_DISK)
    max_in_cpu: int = key(None, "nvme: elements kept in host memory", gt=0, no_effect=_ON_DISK)


@dataclass(frozen=True)
class ZeroOptimization:
    """The sub-keys of `zero_optimization`."""

    stage: int = key(
        0, "What data-parallel ranks share out: 0 nothing, 1 optimizer, 2 +gradients, 3 +weights", ge=0, le=3
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
        "Stage 3: ranks of one machine that keep a copy of the weights (ZeRO++); native engine: over which weights, "
        "gradients and states are cut, with a copy in every such group",
        ge=1,
    )
    stage3_use_all_reduce_for_fetch_params: bool = key(False, "Stage 3: fetch weights by all-reduce")
    stage3_allgather_sequential: bool = key(False, "Stage 3: fetch weights one after another")
    stage3_model_persistence_threshold: int = key(None, "Stage 3: elements of small parameters that stay", ge=0)
    ignore_unused_parameters: bool = key(True, "Stage 2: allow unused weights", no_effect=_ALL_USED)
    memory_efficient_linear: bool = key(True, "Stage 3: DeepSpeed's linear", no_effect="linears are ours")
    stage3_gather_16bit_weights_on_model_save: bool = key(False, "Stage 3: DeepSpeed's save", no_effect=_OUR_FILES)
    stage3_gather_fp16_weights_on_model_save: bool = key(False, "Old name of the former", no_effect=_OUR_FILES)
    elastic_checkpoint: bool = key(False, "DeepSpeed's save", no_effect=_OUR_FILES)
    zero_quantized_weights: bool = key(False, "ZeRO++", refuse=_QUANTIZED)
    zero_quantized_gradients: bool = key(False, "ZeRO++", refuse=_QUANTIZED)
    sub_group_size: int = key(1_000_000_000, "Stage 3: parameters updated at once", gt=0)
    stage3_prefetch_bucket_size: int = key(50_000_000, "Stage 3: elements fetched ahead", ge=0)
    stage3_param_persistence_threshold: int = key(100_000, "Stage 3: smaller parameters stay whole", ge=0)
    stage3_max_live_parameters: int = key(1_000_000_000, "Stage 3: parameters resident before release", ge=0)
    stage3_max_reuse_distance: int = key(1_000_000_000, "Stage 3: keep a parameter reused within this many", ge=0)
    load_from_fp32_weights: bool = key(
        True, "Take master weights from checkpoints", no_effect="they are read with the optimizer's state"
    )
    cpu_offload: bool = key(False, "Old spelling of offload_optimizer: {device: cpu}")
    offload_optimizer: Mapping[str, Any] | None = key(None, "Optimizer state off the device", section=OffloadOptimizer)
    offload_param: Mapping[str, Any] | None = key(None, "Stage 3: weights off the device", section=OffloadParam)


@dataclass(frozen=True)
class Fp16:
    """The sub-keys of `fp16`."""

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
    """The sub-keys of `bf16`."""

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
    """The sub-keys of `data_types`."""

    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = key(
        "fp32",
        "Type gradients are summed in",
        no_effect="gradients are summed in fp32, in which small terms are not lost",
    )


@dataclass(frozen=True)
class CurriculumSchedule:
    """The sub-keys of `curriculum_learning.schedule_config`."""

    total_curriculum_step: int = key(None, "fixed_linear, fixed_root: iterations until max_difficulty", gt=0)
    difficulty_step: int = key(None, "fixed_linear, fixed_root: lengths are multiples of this", gt=0)
    root_degree: int = key(None, "fixed_root: which root", gt=0)
    difficulty: tuple[int, ...] = key(None, "fixed_discrete: lengths")
    max_step: tuple[int, ...] = key(None, "fixed_discrete: last iteration of each length but the last")


@dataclass(frozen=True)
class CurriculumLearning:
    """DeepSpeed's names and formulas (its legacy curriculum learning)."""

    enabled: bool = key(False, "Use it")
    curriculum_type: Literal["seqlen"] = key("seqlen", "What grows")
    min_difficulty: int = key(None, "Length at first", ge=1)
    max_difficulty: int = key(None, "Length at last: seq_length", ge=1)
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] = key("fixed_linear", "How it grows")
    schedule_config: Mapping[str, Any] = key(None, "The schedule's numbers", section=CurriculumSchedule)


@dataclass(frozen=True)
class SeqCurriculum:
    """The sub-keys of `seq_curriculum`."""

    seq_len: tuple[int, ...] = key(REQUIRED, "Lengths of the phases; each divides seq_length")
    until: tuple[int, ...] = key(REQUIRED, "Last iteration of each phase but the last")


@dataclass(frozen=True)
class WeightSchedule:
    """The sub-keys of `train_data_weight_schedule`."""

    weights: tuple[tuple[float, ...], ...] = key(REQUIRED, "Weights of train_data_paths in each phase; 0: not drawn")
    until: tuple[int, ...] = key(REQUIRED, "Last iteration of each phase but the last")


@dataclass(frozen=True)
class CommsLogger:
    """The sub-keys of `comms_logger`."""

    enabled: bool = key(False, "Use it")
    verbose: bool = key(False, "Print every collective")
    prof_all: bool = key(True, "Record all kinds of collectives")
    debug: bool = key(False, "Name the callers")
    prof_ops: tuple[str, ...] = key((), "Kinds to record, with prof_all false")


@dataclass(frozen=True)
class RopeScaling:
    """The sub-keys of `rope_scaling`, by HuggingFace's names."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope"] = key(REQUIRED, "Method")
    factor: float = key(None, "How much longer sequences become; longrope: by max_position_embeddings", ge=1)
    original_max_position_embeddings: int = key(None, "Length the model was trained at first", ge=1)
    low_freq_factor: float = key(None, "llama3", gt=0)
    high_freq_factor: float = key(None, "llama3", gt=0)
    beta_fast: float = key(None, "yarn", gt=0)
    beta_slow: float = key(None, "yarn", gt=0)
    attention_factor: float = key(
        None,
        "yarn, longrope: multiplies the tables; unset: 0.1 ln(factor) + 1, in longrope sqrt(1 + ln(factor) / "
        "ln(original)) of the factor max_position_embeddings / original",
        gt=0,
    )
    mscale: float = key(None, "yarn, as DeepSeek", gt=0)
    mscale_all_dim: float = key(None, "yarn, as DeepSeek", gt=0)
    truncate: bool = key(
        None, "yarn: the first and last dimension of the ramp are whole numbers; unset: true; gpt-oss: false"
    )
    short_factor: tuple[float, ...] = key(
        None, "longrope: divides the frequencies, one number each, in texts up to the original length", gt=0
    )
    long_factor: tuple[float, ...] = key(None, "longrope: the same in longer texts", gt=0)
    llama_4_scaling_beta: float = key(
        None, "yarn: queries at position p are multiplied by 1 + beta ln(1 + floor(p / original)); Ministral 3", gt=0
    )
