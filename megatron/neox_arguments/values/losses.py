"""What the losses of a run ask of its data and its reference model, from the table `keys.losses`."""

from typing import Literal

from megatron.neox_arguments.keys.losses import FORGET_LOSSES, TRAIN_IMPLS, Loss
from megatron.neox_arguments.resolved import ResolvedArgs

_SAVING_THAT_PAYS = 0.02  # of the tokens; attention, which reads prefixes where others stand, takes about that


def sample_kind(args: ResolvedArgs) -> Literal["texts", "pairs", "answers", "rollouts"]:
    """What a sample of a run is: tokens to be predicted, two answers to a prompt, one that is judged, or one
    that the model writes itself."""
    impl = TRAIN_IMPLS[args.train_impl]
    return "rollouts" if impl.online and args.dataset_impl == "online" else impl.reads


def writes_pairs(args: ResolvedArgs) -> bool:
    """Whether a run is trained on pairs of answers that its model writes (online DPO)."""
    return args.train_impl == "dpo" and sample_kind(args) == "rollouts"


def row_places(args: ResolvedArgs) -> int:
    """Tokens that a row of the data holds: seq_length that the model reads and one more, which is only
    predicted; a reward model predicts none."""
    return args.seq_length + (args.train_impl != "rm")


def losses_of(args: ResolvedArgs) -> dict[str, Loss]:
    """The table's entries of the losses that a run adds up, by name."""
    impl = TRAIN_IMPLS[args.train_impl]
    chosen = getattr(args, impl.key) if impl.key else ()
    return {name: impl.losses[name] for name in ((chosen,) if isinstance(chosen, str) else chosen)}


def needs_reference(args: ResolvedArgs) -> bool:
    """Whether batches hold the log-probabilities of a reference model."""
    if args.train_impl == "reinforce":
        return args.kl_div_beta > 0.0
    among_losses = any(loss.needs_reference for loss in losses_of(args).values()) and not args.dpo_reference_free
    return among_losses or forgets_beside_reference(args) or retains_by_divergence(args)


def forgets_beside_reference(args: ResolvedArgs) -> bool:
    """Whether sequences of `ga_dataset` are compared with a reference model's log-probabilities of them."""
    return args.ga_dataset is not None and FORGET_LOSSES[args.ga_loss_type].needs_reference


def retains_by_divergence(args: ResolvedArgs) -> bool:
    """Whether tokens of `gd_retain_dataset` are compared with a reference model's distributions."""
    return args.ga_dataset is not None and args.gd_mode and args.gd_retain_loss_type == "kl"


def scores_reference(args: ResolvedArgs) -> bool:
    """Whether the run computes the log-probabilities of its reference itself: sets of pairs may come with
    them."""
    precomputed = args.precompute_model_name is not None and sample_kind(args) == "pairs"
    return needs_reference(args) and not precomputed


def reference_by(args: ResolvedArgs) -> Literal["cache", "on_the_fly"]:
    """`dpo_reference`, and what its `auto` is."""
    if args.dpo_reference != "auto":
        return args.dpo_reference
    return "cache" if args.lora is None and sample_kind(args) != "rollouts" else "on_the_fly"


def penalises_divergence(args: ResolvedArgs) -> bool:
    """Whether answers that the model writes are compared with a reference model's whole distributions
    (`kl_impl: full`)."""
    return args.train_impl == "reinforce" and args.kl_div_beta > 0.0 and args.kl_impl == "full"


def loss_temperature(args: ResolvedArgs) -> float:
    """What the logits of answers are divided by in the loss: in reinforcement learning by as much as the
    sampler did (`rollout`)."""
    if args.train_impl != "reinforce" or args.rollout is None:
        return 1.0
    return args.rollout["temperature"] or 1.0


def asks_teacher(args: ResolvedArgs) -> bool:
    """Whether a teacher is there while the model trains, and can be asked for any batch."""
    return args.distillation is not None and not args.distillation["cache"]


def least_prefix_saving(args: ResolvedArgs) -> float | None:
    """The share of a set's tokens from which on the prefixes that pairs share are laid out once; None: never
    (`prefix_sharing`)."""
    if not args.prefix_sharing or sample_kind(args) != "pairs" or args.pack_impl != "best_fit" or args.compat_pack_impl:
        return None
    if args.prefix_sharing == "auto":
        dropout = args.hidden_dropout or args.attention_dropout or args.lora_dropout
        return None if dropout or args.rotates_by_length or args.mamba_blocks else _SAVING_THAT_PAYS
    return 0.0


def needs_step_baselines(args: ResolvedArgs) -> bool:
    """Whether the loss compares examples with all examples of the optimizer step; GPT-NeoX's KTO does not."""
    return any(loss.needs_step_baselines for loss in losses_of(args).values()) and not args.compat_kto
