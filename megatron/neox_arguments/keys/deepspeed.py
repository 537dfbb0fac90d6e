"""Declares the keys that GPT-NeoX passes to DeepSpeed, and the keys that it computes from other keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.sections import CommsLogger, CurriculumLearning

_REMOVED = "DeepSpeed 0.19.8 no longer has it; remove it"
_UNUSED = "GPT-NeoX never reads it; write {} instead"
_REPEATS = "another value is refused, with both places: one of them had no effect"
_RENAMED = "the run stops at start and names the key to write instead"
_STOPS = "the run stops at start; remove the key"


@dataclass(frozen=True)
class DeepspeedKeys:
    """Configuration keys that GPT-NeoX passes on to DeepSpeed."""

    deepspeed: Literal[True, False] = key(
        True, "Train on DeepSpeed", refuse_values={False: "write engine: native instead"}
    )
    deepspeed_config_file: str | None = new_key(
        None, "A DeepSpeed configuration (JSON); its keys count as if written here, and messages name that file"
    )
    deepspeed_extra_args: Mapping[str, Any] | None = key(
        None, "Further keys for DeepSpeed's configuration; they may repeat ours, not contradict them"
    )
    fp32_allreduce: bool = key(False, "Reduce gradients in fp32", no_effect="unset communication_data_type is fp32")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = key(
        None,
        "Type of gradients in communication; unset: fp32",
        differs="GPT-NeoX uses the type of the weights: set bf16 or fp16 for its traffic",
    )
    prescale_gradients: bool = key(False, "Divide gradients before their sum over ranks, not after")
    gradient_predivide_factor: float = key(
        1.0, "Without prescale_gradients: divide gradients by this before their sum", gt=0
    )
    curriculum_learning: Mapping[str, Any] | None = key(
        None, "Grow the sequence length while training", section=CurriculumLearning
    )
    curriculum_seqlen: int = key(
        0, "Current sequence length of the curriculum", refuse="curriculum_learning sets it; remove it"
    )
    dump_state: bool = key(False, "Let DeepSpeed print its state at start")
    flops_profiler: Mapping[str, Any] | None = key(
        None,
        "DeepSpeed's FLOPs profiler",
        refuse="it hangs in pipelines; FLOPs are in every log line, and profile: true traces",
    )
    comms_logger: Mapping[str, Any] | None = key(None, "DeepSpeed's log of collectives", section=CommsLogger)
    steps_per_print: int = key(10, "DeepSpeed's own log interval", no_effect="log_interval decides")
    wall_clock_breakdown: bool = key(False, "DeepSpeed's timers", no_effect="DeepSpeed's timers are not printed")
    scheduler: Mapping[str, Any] | None = key(
        None, "DeepSpeed's learning-rate schedule", refuse="write lr_decay_style, warmup and min_lr instead"
    )
    activation_checkpointing: Mapping[str, Any] | None = key(
        None,
        "DeepSpeed's section of activation checkpointing",
        refuse=_UNUSED.format("checkpoint_activations, checkpoint_in_cpu"),
    )
    tensorboard: Mapping[str, Any] | None = key(None, "DeepSpeed's monitor", refuse="write tensorboard_dir instead")
    wandb: Mapping[str, Any] | None = key(None, "DeepSpeed's monitor", refuse="write use_wandb instead")
    csv_monitor: Mapping[str, Any] | None = key(
        None, "DeepSpeed's monitor", refuse="metrics.jsonl in log_dir holds every value; remove it"
    )
    checkpoint: Mapping[str, Any] | None = key(
        None, "DeepSpeed's section of checkpoints", refuse="checkpoints are written and checked by us; remove it"
    )
    data_efficiency: Mapping[str, Any] | None = key(
        None, "DeepSpeed's data sampler", refuse="it needs DeepSpeed's own loader; use curriculum_learning"
    )
    autotuning: Mapping[str, Any] | None = key(
        None, "DeepSpeed's autotuner", refuse="it starts runs its own way; measure with benchmarks/train_throughput.py"
    )
    autotuning_run: str | None = key(None, "DeepSpeed's autotuner", refuse="see autotuning; remove it")
    sparse_gradients: bool = key(False, "Sparse embedding gradients", refuse=_REMOVED)
    amp: Mapping[str, Any] | None = key(
        None,
        "apex's mixed precision",
        refuse="DeepSpeed 0.19.8 no longer has it; write bf16: {enabled: true} or fp16: {enabled: true}",
    )
    elasticity: Mapping[str, Any] | None = key(None, "Batch sizes for changing worlds", refuse=_REMOVED)
    compression_training: Mapping[str, Any] | None = key(None, "Quantised, pruned training", refuse=_REMOVED)
    sparse_attention: Mapping[str, Any] | None = key(None, "Block-sparse attention", refuse=_REMOVED)


@dataclass(frozen=True)
class MadeKeys:
    """Configuration keys of GPT-NeoX that are computed from other keys. A file may set them only to the
    computed value."""

    batch_size: int = key(None, "Samples of one forward pass", same_as="train_micro_batch_size_per_gpu", ge=1)
    clip_grad: float = key(1.0, "Largest gradient norm", same_as="gradient_clipping", ge=0, unread=_REPEATS)
    lr: float = key(None, "Peak learning rate", same_as="optimizer.params.lr", ge=0)
    optimizer_type: str = key("adam", "Optimizer", same_as="optimizer.type")
    zero_stage: int = key(None, "ZeRO stage", same_as="zero_optimization.stage", ge=0, le=3)
    zero_reduce_scatter: bool = key(
        None, "ZeRO's reduce_scatter", same_as="zero_optimization.reduce_scatter", unread=_REPEATS
    )
    zero_contiguous_gradients: bool = key(
        None, "ZeRO's contiguous_gradients", same_as="zero_optimization.contiguous_gradients", unread=_REPEATS
    )
    zero_reduce_bucket_size: int = key(
        None, "ZeRO's reduce_bucket_size", same_as="zero_optimization.reduce_bucket_size", gt=0, unread=_REPEATS
    )
    zero_allgather_bucket_size: int = key(
        None, "ZeRO's allgather_bucket_size", same_as="zero_optimization.allgather_bucket_size", gt=0, unread=_REPEATS
    )
    is_pipe_parallel: bool = key(
        False, "Whether pipe_parallel_size is at least 1", no_effect="pipe_parallel_size decides"
    )
    dynamic_loss_scale: bool = key(
        None,
        "Whether fp16 has no fixed loss scale",
        no_effect="fp16.loss_scale decides",
        unread="GPT-NeoX ignores it too",
    )
    loss_scale: float | None = key(None, "Fixed loss scale", refuse=_UNUSED.format("fp16.loss_scale"), unread=_RENAMED)
    loss_scale_window: float = key(1000.0, "fp16", refuse=_UNUSED.format("fp16.loss_scale_window"), unread=_RENAMED)
    min_scale: float = key(1.0, "fp16", refuse=_UNUSED.format("fp16.min_loss_scale"), unread=_RENAMED)
    hysteresis: int = key(2, "fp16", refuse=_UNUSED.format("fp16.hysteresis"), unread=_RENAMED)
    global_num_gpus: int | None = key(None, "Ranks in all", no_effect="the started ranks are counted", ge=1)
    world_size: int | None = key(None, "Ranks in all", no_effect="the started ranks are counted")
    rank: int | None = key(None, "This rank", refuse="the launcher sets it; remove it")
    local_rank: int | None = key(None, "This rank's index on its machine", refuse="the launcher sets it; remove it")
    user_script: str | None = key(None, "Script to start", refuse="the command line says it; remove it")
    do_train: bool | None = key(None, "Whether there is training data", refuse="train_iters decides; remove it")
    do_valid: bool | None = key(None, "Whether there is validation", refuse="split and eval_iters decide; remove it")
    do_test: bool | None = key(None, "Whether there is a test set", refuse="split and eval_iters decide; remove it")
    config_files: Mapping[str, Any] = key(
        None, "Text of the files read, by file name", refuse="it is made from the files read; remove it"
    )
    comet_experiment: Any = key(None, "Comet's object", refuse="it is made at start; remove it")


@dataclass(frozen=True)
class DeadKeys:
    """Configuration keys that GPT-NeoX declares but that have no use any more. A run refuses or ignores
    them."""

    adlr_autoresume: bool = key(
        False, "NVIDIA's internal scheduler", refuse="a run resumes from `save` by itself; remove it", unread=_STOPS
    )
    adlr_autoresume_interval: int = key(
        1000, "See adlr_autoresume", refuse="see adlr_autoresume; remove it", unread=_STOPS
    )
    deepscale: bool = key(False, "DeepSpeed's old name", refuse="GPT-NeoX never reads it; remove it", unread=_STOPS)
    deepscale_config: str | None = key(
        None, "DeepSpeed's old name", refuse="GPT-NeoX never reads it; remove it", unread=_STOPS
    )
    lazy_mpu_init: bool = key(False, "Groups made by another program", refuse="groups are made at start; remove it")
    short_seq_prob: float = key(0.1, "BERT's short samples", refuse="GPT-NeoX never reads it; remove it", unread=_STOPS)
    onnx_safe: bool = key(False, "Avoid operations ONNX lacks", no_effect="there are no such operations")
    num_unique_layers: int | None = key(
        None, "Shared layers", refuse="parameter sharing left GPT-NeoX before 2.0; remove it", unread=_STOPS
    )
    param_sharing_style: str = key(
        "grouped", "See num_unique_layers", refuse="see num_unique_layers; remove it", unread=_STOPS
    )
