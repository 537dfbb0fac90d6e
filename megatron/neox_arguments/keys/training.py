"""Keys of the optimizer, the learning-rate schedule, the training loop and its checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.sections import Optimizer, Trainable


@dataclass(frozen=True)
class OptimizerKeys:
    """The optimizer and the learning-rate schedule."""

    optimizer: Mapping[str, Any] = key(None, "Optimizer; unset: Adam with lr 0.001", section=Optimizer)
    trainable: Mapping[str, Any] | None = new_key(
        None, "Parameters that are trained, all others stay as they are; unset: all", section=Trainable
    )
    use_bnb_optimizer: bool = key(False, "Adam, AdamW: keep moments in 8 bits (needs bitsandbytes)")
    fused_update: Literal["auto"] | bool = new_key(
        "auto",
        "Native engine, AdamW in 16 bits, one data rank and micro-batch: the update reads gradients as backward leaves "
        "them and writes weights, in one pass over memory; auto: on GPUs where the run can; printed",
    )
    overlap_optimizer_with_forward: Literal["auto"] | bool = new_key(
        "auto",
        "Native engine: the update of a step runs under the forward of the next, each layer's weights before their "
        "first use; auto: on GPUs where this has run; printed",
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
    warmup: float = key(0.01, "Share of lr_decay_iters in which the learning rate rises", ge=0, le=1)
    warmup_iters: int | None = new_key(None, "Iterations in which the learning rate rises, instead of warmup", ge=0)
    override_lr_scheduler: bool = key(False, "Resume with this file's schedule although the checkpoint has another")
    use_checkpoint_lr_scheduler: bool = key(False, "Resume with the checkpoint's schedule although this file differs")


@dataclass(frozen=True)
class TrainingKeys:
    """The training loop: how long, when to validate and stop, what is recomputed."""

    train_iters: int = key(None, "Optimizer steps of the run", ge=1, le=10**9)
    seed: int = key(1234, "Seed of initialisation, data order and dropout", ge=0, lt=2**32)
    deterministic_mode: bool = new_key(False, "Only operations that give the same bits every time (Megatron; slower)")
    tf32: bool = new_key(False, "GPUs multiply fp32 matrices in TF32: faster, but with 10 bits of mantissa, not 23")
    z_loss: float = key(
        0.0,
        "Weight of the squared log-sum of the logits in the loss (PaLM); train_impl rm: of the squares of the scores",
        ge=0,
    )
    eval_interval: int = key(1000, "Iterations between validations", ge=1)
    eval_iters: int = key(100, "Batches of one validation; 0 for none", ge=0)
    exit_interval: int | None = key(None, "Stop, with a checkpoint, at multiples of this many iterations", ge=1)
    exit_duration_in_mins: float | None = new_key(None, "Stop, with a checkpoint, after this long", gt=0)
    on_nonfinite: Literal["stop", "skip"] = new_key(
        "stop", "A step whose loss or gradient is NaN or Inf: end or leave out"
    )
    nonfinite_limit: int = new_key(10, "on_nonfinite: skip: steps left out in a row before the run ends", ge=1)
    skip_step_above_sigma: float | None = new_key(
        None, "Leave out steps whose loss is this many standard deviations above the recent ones", gt=0
    )
    callbacks: tuple[str, ...] = new_key(
        (), "Own callbacks, as FILE.py:CLASS: subclasses of megatron.callbacks.Callback, made without arguments"
    )
    checkpoint_activations: bool = key(False, "Recompute activations in the backward pass instead of keeping them")
    checkpoint_num_layers: int = key(1, "Blocks recomputed together", ge=1)
    recompute_granularity: Literal["full", "selective"] = new_key(
        "full",
        "checkpoint_activations: recompute all of a block, or all but its matrix products and attention, which cost "
        "most and are kept (Megatron)",
    )
    recompute_every: int = new_key(
        1, "checkpoint_activations: recompute every so many-th block alone (torchtitan's selective_ac_option)", ge=1
    )
    activation_memory_budget: float | None = new_key(
        None,
        "Share of the activations of a compiled block that is kept; torch.compile chooses which to recompute, cheapest "
        "first. 1: what it keeps of itself; 0: the inputs alone",
        ge=0,
        le=1,
    )
    checkpoint_in_cpu: bool = key(False, "Keep the inputs of recomputed blocks in host memory")
    contiguous_checkpointing: bool = key(
        False, "Keep those inputs in one buffer", no_effect="the allocator does not fragment from them"
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
    """What is saved where and when, and what a run starts from."""

    save: str | None = key(
        None, "Folder that checkpoints are written to; also s3://BUCKET/FOLDER and whatever fsspec reaches"
    )
    load: str | None = key(
        None, "Folder that a checkpoint is read from; hf://ORG/NAME or a HuggingFace folder: its weights, at the start"
    )
    save_hf: int | None = new_key(
        None,
        "Also write HuggingFace's format, in <save>/huggingface, every so many iterations; 0: after the last alone",
        ge=0,
    )
    checkpoint_scale: Literal["linear", "log"] = key(
        "linear", "Save every checkpoint_factor iterations, or at its powers"
    )
    checkpoint_factor: int | float | None = key(None, "See checkpoint_scale", gt=0)
    save_interval_in_mins: float | None = new_key(
        None, "Also save when this long has passed since the last timed save", gt=0
    )
    extra_save_iters: tuple[int, ...] | None = key(None, "Further iterations to save at; 0 is the start")
    async_save: bool = new_key(True, "Write checkpoints beside the steps that follow, from a copy in host memory")
    keep_last_n_checkpoints: int | None = key(
        None, "Delete older checkpoints", ge=1, differs="GPT-NeoX deletes nothing when save ends in a slash"
    )
    keep_checkpoints_every: int | None = new_key(None, "Multiples of so many iterations are never deleted", ge=1)
    keep_best_n_checkpoints: int | None = new_key(
        None, "So many with the lowest validation loss are not deleted, of those saved where it was computed",
        ge=1
    )  # fmt: skip
    save_best: str | None = new_key(
        None,
        "Keep the best model of the validations after the first step in <save>/best_model, in HuggingFace's format, by "
        "this metric: validation/lm_loss, validation/rewards/accuracies, eval_tasks/TASK_METRIC; where its name does "
        "not say which is better, `:min` or `:max` after it does",
    )
    ephemeral_save_interval: int | None = new_key(
        None, "Also save every so many iterations, each until the next checkpoint", ge=1
    )
    finetune: bool = key(False, "Take only the weights from `load` and start at iteration 0")
    init_only: bool = new_key(
        False, "train.py: write the weights that seed gives into `save`, as iteration 0, and end; no GPU is needed"
    )
    iteration: int | None = key(None, "Checkpoint to load; unset: the one `latest` names", ge=0)
    no_save_optim: bool = key(
        False,
        "Checkpoints without the optimizer's state",
        no_effect="checkpoints keep the optimizer state, as in GPT-NeoX; set compat_no_save_optim to leave it out",
        unread="GPT-NeoX ignores it too: followed, it would lose a run that is requeued",
    )
    compat_no_save_optim: bool = new_key(
        False,
        "What no_save_optim says: checkpoints without the optimizer's state, small, from which a run goes on with "
        "no_load_optim: true alone",
    )
    no_save_rng: bool = key(False, "Checkpoints without the states of the random number generators")
    checkpoint_validation_with_forward_pass: bool = key(
        False, "Keep the logits of a fixed batch in checkpoints, and compare them after loading"
    )
    remote_staging: str | None = new_key(
        None, "Local folder of each machine for what goes to and comes from a remote `save` or `load`; "
        "unset: in the temporary folder (TMPDIR)"
    )  # fmt: skip
    remote_patience: float = new_key(
        600.0, "Seconds that a remote store which does not answer is tried again before that fails", ge=0
    )
    s3_path: str | None = key(
        None, "Also write checkpoints to this bucket", refuse="save itself may be s3://BUCKET/FOLDER; remove it"
    )
    s3_chunk_size: int = key(
        104857600, "Bytes of one part of an upload", refuse="the parts are chosen by s3fs; remove it", gt=0
    )
    no_load_optim: bool = key(False, "Do not load the optimizer's state")
    no_load_rng: bool = key(False, "Do not load the states of the random number generators")
    restart: bool = new_key(False, "Start from `load`, or afresh, although `save` holds a checkpoint of this run")
    load_fallback: bool = new_key(False, "If the newest checkpoint is damaged or holds NaN or Inf, load the one before")
    allow_changed_data: bool = new_key(False, "Resume although the data is not what the checkpoint was trained on")
