"""Derives from the tables of losses which data and which reference model the losses of a run need."""

from typing import Literal

from megatron.neox_arguments.keys.losses import Loss
from megatron.neox_arguments.methods import declaration_of, train_impls
from megatron.neox_arguments.resolved import ResolvedArgs

_SAVING_THAT_PAYS = 0.02  # share of tokens; about the cost of attention that reads shared prefixes


def sample_kind(args: ResolvedArgs) -> Literal["texts", "pairs", "answers", "generated"]:
    """Returns the kind of data that a run trains on.

    texts: documents. pairs: a chosen and a rejected answer. answers: one answer with a judgement. generated:
    answers that the model writes.
    """
    impl = train_impls()[args.train_impl]
    return "generated" if impl.online and args.dataset_impl == "online" else impl.reads


def writes_pairs(args: ResolvedArgs) -> bool:
    """Returns whether a run trains on pairs of answers that its model writes (online DPO)."""
    return args.train_impl == "dpo" and sample_kind(args) == "generated"


def row_places(args: ResolvedArgs) -> int:
    """Returns the number of tokens in a row of data: seq_length + 1, because the last position needs a label.

    For a reward model, which predicts no tokens, returns seq_length.
    """
    return args.seq_length + (args.train_impl != "rm")


def losses_of(args: ResolvedArgs) -> dict[str, Loss]:
    """Returns the losses whose sum a run minimises, by name, from the table of losses of its `train_impl`."""
    impl = train_impls()[args.train_impl]
    chosen = getattr(args, impl.key) if impl.key else ()
    return {name: impl.losses[name] for name in ((chosen,) if isinstance(chosen, str) else chosen)}


def needs_reference(args: ResolvedArgs) -> bool:
    """Returns whether batches contain the log-probabilities of a reference model."""
    declared = declaration_of(args).needs_reference(args)
    return any(loss.needs_reference for loss in losses_of(args).values()) if declared is None else declared


def scores_reference(args: ResolvedArgs) -> bool:
    """Returns whether the run computes the reference model's log-probabilities itself. Data of pairs may
    contain them instead (`precompute_model_name`)."""
    precomputed = args.precompute_model_name is not None and sample_kind(args) == "pairs"
    return needs_reference(args) and not precomputed


def reference_mode(args: ResolvedArgs) -> Literal["cache", "on_the_fly"]:
    """Returns the value of `dpo_reference`, in which `auto` is replaced by cache or on_the_fly."""
    if args.dpo_reference != "auto":
        return args.dpo_reference
    return "cache" if args.lora is None and sample_kind(args) != "generated" else "on_the_fly"


def check_scored_before(args: ResolvedArgs) -> None:
    """Raises ConfigError if steps of the run compute the reference's log-probabilities, which no plan
    counts."""
    if scores_reference(args) and reference_mode(args) == "on_the_fly":
        raise args.error("dpo_reference", "a reference on the fly cannot be planned yet; set dpo_reference: cache")


def loss_temperature(args: ResolvedArgs) -> float:
    """Returns the divisor of logits in the loss: 1, or the temperature that a kind of training sets."""
    return declaration_of(args).loss_temperature(args) or 1.0


def least_prefix_saving(args: ResolvedArgs) -> float | None:
    """Returns the share of a data set's tokens that prefix sharing must save to be used; None: never use it.

    Prefix sharing stores the common prefix of a pair once in a row (`prefix_sharing`).
    """
    if not args.prefix_sharing or sample_kind(args) != "pairs" or args.pack_impl != "best_fit" or args.compat_pack_impl:
        return None
    if args.prefix_sharing == "auto":
        dropout = args.hidden_dropout or args.attention_dropout or args.lora_dropout
        return None if dropout or args.rotates_by_length or args.state_blocks else _SAVING_THAT_PAYS
    return 0.0
