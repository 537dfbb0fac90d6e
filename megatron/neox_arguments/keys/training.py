"""Declares the keys of the optimizer, the learning-rate schedule, the training loop and its checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.sections import BranchedFrom, Optimizer


@dataclass(frozen=True)
class OptimizerKeys:
    """Configuration keys of the optimizer and the learning-rate schedule."""

    optimizer: Mapping[str, Any] = key(None, "Optimizer; unset: Adam with lr 0.001", section=Optimizer)
    use_bnb_optimizer: bool = key(False, "Adam, AdamW: keep moments in 8 bits (needs bitsandbytes)")
    fused_update: Literal["auto"] | bool = new_key(
        "auto",
        "Native engine, AdamW in 16 bits, one data rank and micro-batch: update weights in one pass over memory, "
        "reading gradients as backward leaves them. auto: on GPUs if the run allows it; printed",
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] = new_key(
        "fp32",
        "Native engine, Adam or AdamW: dtype of the moments. bf16 takes less memory, rounds stochastically, and is "
        "another recipe than GPT-NeoX's",
    )
    ema_decay: float | None = new_key(
        None,
        "Native engine: keep an exponential moving average of the weights: after each step it takes 1 - ema_decay of "
        "the new ones. It is saved, validated as validation/ema, and loaded by load_ema",
        gt=0, lt=1,
    )  # fmt: skip
    qk_clip_threshold: float | None = new_key(
        None,
        "Native engine: after each update, scale down queries and keys of heads whose largest attention logit of the "
        "step was above this (QK-Clip of Kimi K2, which has 100). It costs one more product of queries and keys",
        gt=0,
    )  # fmt: skip
    overlap_optimizer_with_forward: Literal["auto"] | bool = new_key(
        "auto",
        "Native engine: overlap a step's update with the next forward, updating each layer's weights before "
        "their first use. auto: off, as it gained 0.3 % on an H200; printed",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = new_key(
        "none", "Multiply lr and min_lr by the data-parallel size, or by its root"
    )
    weight_decay: float = key(0.1, "Decoupled weight decay; norms and biases have none", ge=0)
    gradient_clipping: float = key(
        1.0,
        "Largest norm of the whole gradient; 0 for none",
        ge=0,
        differs="GPT-NeoX reads 1.0 as none (#1432): compat_clip_one_is_off",
    )
    compat_clip_one_is_off: bool = new_key(False, "Read gradient_clipping 1.0 as none, as GPT-NeoX did by mistake")
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "wsd"] = key(
        "linear",
        "Shape of the learning rate after warm-up; wsd: constant, then lr_wsd_decay_style",
        differs="GPT-NeoX's cosine rises again after lr_decay_iters; here it stays at min_lr",
    )
    lr_decay_iters: int = key(None, "Iterations until min_lr; unset: lr_decay_fraction of train_iters, or all", ge=1)
    lr_decay_fraction: float | None = key(None, "lr_decay_iters in units of train_iters", gt=0, le=1)
    lr_wsd_decay_iters: int | None = new_key(None, "wsd: iterations of the final decay", ge=1)
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = new_key(
        "linear", "wsd: shape of the final decay, as Megatron's"
    )
    min_lr: float = key(0.0, "Smallest learning rate after warm-up", ge=0)
    warmup: float = key(0.01, "Warm-up as a share of lr_decay_iters", ge=0, le=1)
    warmup_iters: int | None = new_key(None, "Iterations of warm-up, instead of warmup", ge=0)
    override_lr_scheduler: bool = key(False, "Resume with this file's schedule even if the checkpoint has another")
    use_checkpoint_lr_scheduler: bool = key(False, "Resume with the checkpoint's schedule even if this file differs")


@dataclass(frozen=True)
class TrainingKeys:
    """Configuration keys of the training loop: its length, when to validate and stop, and which activations
    to recompute."""

    train_iters: int = key(None, "Optimizer steps of the run", ge=1, le=10**9)
    seed: int = key(1234, "Seed of initialisation, data order and dropout", ge=0, lt=2**32)
    deterministic_mode: bool = new_key(False, "Use only bitwise reproducible operations (Megatron; slower)")
    tf32: bool = new_key(False, "Multiply fp32 matrices in TF32 on GPUs: faster, but with 10 bits of mantissa, not 23")
    z_loss: float = key(
        0.0,
        "Weight of the squared log-sum of the logits in the loss (PaLM); train_impl rm: of the squares of the scores",
        ge=0,
    )
    eval_interval: int = key(1000, "Iterations between validations", ge=1)
    eval_iters: int = key(100, "Batches of one validation; 0 for none", ge=0)
    exit_interval: int | None = key(None, "Stop, with a checkpoint, at multiples of this many iterations", ge=1)
    exit_duration_in_mins: float | None = new_key(None, "Stop, with a checkpoint, after this many minutes", gt=0)
    on_nonfinite: Literal["stop", "skip"] = new_key(
        "stop", "If loss or gradient is NaN or Inf: end the run, or skip the step"
    )
    nonfinite_limit: int = new_key(10, "on_nonfinite: skip: consecutive skipped steps before the run ends", ge=1)
    on_out_of_memory: Literal["stop", "split"] = new_key(
        "stop",
        "If a step runs out of memory: end the run, or (split) let the next start take it in smaller micro-batches. "
        "deepy.py --max-restarts starts it",
    )
    skip_step_above_sigma: float | None = new_key(
        None, "Skip steps with a loss this many standard deviations above the recent ones", gt=0
    )
    replica_check_interval: int = new_key(
        0,
        "Iterations between comparisons of the weights that several ranks hold, bit by bit; a difference ends the run. "
        "0: none",
        ge=0,
    )
    callbacks: tuple[str, ...] = new_key(
        (),
        "Own callbacks, as FILE.py:CLASS: subclasses of megatron.callbacks.Callback with a constructor without "
        "arguments",
    )
    checkpoint_activations: bool = key(False, "Recompute activations in the backward pass instead of keeping them")
    checkpoint_num_layers: int = key(1, "Blocks recomputed together", ge=1)
    recompute_granularity: Literal["full", "selective"] = new_key(
        "full",
        "checkpoint_activations: recompute all of a block, or (selective) all but its matrix products and "
        "attention, the most costly parts (Megatron)",
    )
    recompute_every: int = new_key(
        1, "checkpoint_activations: recompute only every n-th block (torchtitan's selective_ac_option)", ge=1
    )
    activation_memory_budget: float | None = new_key(
        None,
        "Share of a compiled block's activations to keep; torch.compile chooses the rest to recompute, cheapest "
        "first. 1: its default choice; 0: keep only the inputs",
        ge=0,
        le=1,
    )
    checkpoint_in_cpu: bool = key(False, "Keep the inputs of recomputed blocks in host memory")
    contiguous_checkpointing: bool = key(
        False,
        "Keep the inputs of recomputed blocks in one buffer",
        no_effect="the allocator does not fragment from them",
    )
    deepspeed_activation_checkpointing: bool = key(
        True, "Recompute through DeepSpeed", no_effect="torch's checkpoint does it"
    )
    profile_backward: bool = key(False, "Time recomputation", no_effect="profile shows it")
    partition_activations: bool = key(
        False,
        "Split the inputs kept for recomputation over tensor-parallel ranks",
        no_effect="they are kept whole: more memory, the same numbers; sequence_parallel splits them",
    )
    synchronize_each_layer: bool = key(
        False, "Wait for the device at each layer", no_effect="slows down, changes nothing"
    )


@dataclass(frozen=True)
class CheckpointKeys:
    """Configuration keys of saving checkpoints and of loading one at the start."""

    save: str | None = key(None, "Folder to write checkpoints to; also s3://BUCKET/FOLDER and any other fsspec URL")
    load: str | None = key(
        None, "Folder to read a checkpoint from; hf://ORG/NAME or a HuggingFace folder: its weights, at the start"
    )
    save_hf: int | None = new_key(
        None,
        "Also write HuggingFace's format, in <save>/huggingface, every n iterations; 0: only after the last",
        ge=0,
    )
    checkpoint_scale: Literal["linear", "log"] = key(
        "linear", "linear: save every checkpoint_factor iterations; log: at its powers (1, factor, factor^2, ...)"
    )
    checkpoint_factor: int | float | None = key(None, "Interval or factor between saves: see checkpoint_scale", gt=0)
    save_interval_in_mins: float | None = new_key(None, "Also save every so many minutes", gt=0)
    extra_save_iters: tuple[int, ...] | None = key(None, "Further iterations to save at; 0 is the start")
    async_save: bool = new_key(True, "Write checkpoints in the background, from a copy in host memory")
    keep_last_n_checkpoints: int | None = key(
        None,
        "Delete all but the newest n checkpoints",
        ge=1,
        differs="GPT-NeoX deletes nothing when save ends in a slash",
    )
    keep_checkpoints_every: int | None = new_key(
        None, "Never delete checkpoints at multiples of this many iterations", ge=1
    )
    keep_best_n_checkpoints: int | None = new_key(
        None, "Never delete the n checkpoints with the lowest validation loss, if validated when saved",
        ge=1
    )  # fmt: skip
    save_best: str | None = new_key(
        None,
        "Keep the best model in <save>/best_model, in HuggingFace's format, by this metric: validation/lm_loss, "
        "validation/rewards/accuracies, eval_tasks/TASK_METRIC. Validations after the first step count. Append "
        "`:min` or `:max` if the name leaves the direction open",
    )
    ephemeral_save_interval: int | None = new_key(
        None, "Also save a temporary checkpoint every n iterations; the next save deletes it", ge=1
    )
    local_save: str | None = new_key(
        None,
        "Folder on each machine, on its disk or in its memory (/dev/shm/NAME, $TMPDIR), with the state of the last "
        "steps: a restart goes on from there. Each machine also keeps the files of another",
    )
    local_save_interval: int = new_key(0, "Iterations between copies in local_save", ge=0)
    finetune: bool = key(False, "Take only the weights from `load` and start at iteration 0")
    load_ema: bool = new_key(
        False, "Take the average of the weights from `load` (ema_decay) instead of the last weights; training: with "
        "finetune"
    )  # fmt: skip
    init_only: bool = new_key(
        False, "train.py: write the initial weights of this seed into `save`, as iteration 0, and end; needs no GPU"
    )
    iteration: int | None = key(None, "Checkpoint to load; unset: the one named by `latest`", ge=0)
    no_save_optim: bool = key(
        False,
        "Checkpoints without the optimizer's state",
        no_effect="checkpoints keep the optimizer state, as in GPT-NeoX; set compat_no_save_optim to leave it out",
        unread="GPT-NeoX ignores it too; obeying it would lose requeued runs",
    )
    compat_no_save_optim: bool = new_key(
        False,
        "Do what no_save_optim says: save small checkpoints without optimizer state; resume from them with "
        "no_load_optim: true",
    )
    no_save_rng: bool = key(False, "Checkpoints without the states of the random number generators")
    checkpoint_validation_with_forward_pass: bool = key(
        False, "Keep the logits of a fixed batch in checkpoints, and compare them after loading"
    )
    remote_staging: str | None = new_key(
        None, "Local folder per machine for transfers of a remote `save` or `load`; unset: in the temporary folder "
        "(TMPDIR)"
    )  # fmt: skip
    remote_patience: float = new_key(600.0, "Seconds to retry an unreachable remote store before failing", ge=0)
    s3_path: str | None = key(
        None, "Also write checkpoints to this bucket", refuse="save itself may be s3://BUCKET/FOLDER; remove it"
    )
    s3_chunk_size: int = key(
        104857600, "Bytes of one part of an upload", refuse="the parts are chosen by s3fs; remove it", gt=0
    )
    no_load_optim: bool = key(False, "Do not load the optimizer's state")
    no_load_rng: bool = key(False, "Do not load the states of the random number generators")
    restart: bool = new_key(False, "Start from `load`, or afresh, even if `save` holds a checkpoint of this run")
    load_fallback: bool = new_key(False, "If the newest checkpoint is damaged or holds NaN or Inf, load the one before")
    allow_changed_data: bool = new_key(False, "Resume even if the data differs from the checkpoint's")
    branched_from: Mapping[str, Any] | None = new_key(
        None, "The checkpoint of another run from which this run goes on, written by deepy.py branch",
        section=BranchedFrom
    )  # fmt: skip
