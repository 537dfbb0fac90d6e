"""Checks of the losses of preferences."""

from typing import TYPE_CHECKING

from megatron.neox_arguments.declare import keys_of
from megatron.neox_arguments.errors import Problems
from megatron.neox_arguments.places import is_remote
from megatron.neox_arguments.validate_model import at

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs

SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired", "simpo")
PAIR_KEYS = (
    "dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing", "discopop_tau", "simpo_gamma", "dpo_reference_free",
)  # fmt: skip
WITHOUT_REFERENCE = ("simpo", "orpo", "sft")
SINGLE_KEYS = ("kto_loss_type", "compat_kto")


def validate_preferences(args: "NeoXArgs", problems: Problems) -> None:
    keys = keys_of(type(args))
    for impl, names in (("dpo", PAIR_KEYS), ("kto", SINGLE_KEYS)):
        for name in names:
            if args.train_impl != impl and getattr(args, name) != keys[name].default:
                problems.add(name, f"only train_impl: {impl} reads it, not {at(args, 'train_impl')}; remove it")
    if args.sft_loss_type == "dft" and (args.z_loss or args.train_impl != "normal"):
        problems.add("sft_loss_type", "dft is a loss of train_impl: normal without z_loss; remove one of them")
    if args.neftune_noise_alpha:
        _noise(args, problems)
    if args.train_impl in ("dpo", "kto") and args.z_loss:
        problems.add("z_loss", f"is for language modelling; remove it, or train_impl {at(args, 'train_impl')}")
    if args.train_impl == "dpo":
        _pairs(args, problems)
    _reference(args, problems)
    if args.compat_kto and args.pack_impl != "unpacked":
        problems.add("compat_kto", f"takes an answer for a row; set pack_impl: unpacked (now {at(args, 'pack_impl')})")
    if args.compat_kto and args.kto_loss_type != "kto":
        problems.add("compat_kto", f"GPT-NeoX has no loss but kto; remove it, or {at(args, 'kto_loss_type')}")


def _noise(args: "NeoXArgs", problems: Problems) -> None:
    if args.train_impl != "normal":
        problems.add("neftune_noise_alpha", "is for fine-tuning on texts: a reference has no noise, and the policy "
                     f"would be compared with it; remove it, or train_impl {at(args, 'train_impl')}")  # fmt: skip
    elif args.pack_impl != "packed" and not args.reset_attention_mask:
        problems.add("neftune_noise_alpha", "depends on the length of a document, and rows here hold several or "
                     "padding; set reset_attention_mask: true")  # fmt: skip


def _reference(args: "NeoXArgs", problems: Problems) -> None:
    losses = {args.dpo_loss_type} if isinstance(args.dpo_loss_type, str) else set(args.dpo_loss_type)
    given = args.precompute_model_name is not None
    free = args.dpo_reference_free or losses <= set(WITHOUT_REFERENCE) or given
    needed = args.train_impl == "kto" or args.train_impl == "dpo" and not free
    for name in ("dpo_reference", "reference_cache_dir"):
        if getattr(args, name) == keys_of(type(args))[name].default:
            continue
        if not needed:
            why = "precompute_model_name has them" if given and args.train_impl == "dpo" else "no reference is needed"
            problems.add(name, f"is for log-probabilities of a reference, but {why}; remove it")
        elif name == "reference_cache_dir" and args.dpo_reference != "cache":
            problems.add(name, f"only dpo_reference: cache reads it, not {at(args, 'dpo_reference')}; remove it")
    if not needed:
        return
    if args.kto_kl == "rotated" and args.dpo_reference == "cache":
        problems.add("kto_kl", "rotated makes answers of each micro-batch, which no cache holds; set dpo_reference: "
                               "on_the_fly")  # fmt: skip
    if args.save is not None and is_remote(args.load):
        problems.add("load", "is the reference, and is read again when the run goes on; fetch it, and set load to the "
                             "local folder")  # fmt: skip


def _pairs(args: "NeoXArgs", problems: Problems) -> None:
    losses = (args.dpo_loss_type,) if isinstance(args.dpo_loss_type, str) else args.dpo_loss_type
    weights = args.dpo_loss_weights
    if not losses or len(set(losses)) != len(losses):
        problems.add("dpo_loss_type", f"expected losses, each once, got {list(losses)}")
    if {"aot", "aot_unpaired"} <= set(losses):
        problems.add("dpo_loss_type", "aot and aot_unpaired match pairs differently; take one of them")
    if {"sft", "orpo"} <= set(losses):
        problems.add("dpo_loss_type", "orpo has the likelihood of the chosen answer already; remove sft")
    if weights is not None and len(weights) != len(losses):
        problems.add(
            "dpo_loss_weights",
            f"expected one for each of the {len(losses)} losses of dpo_loss_type ({args.origin('dpo_loss_type')}), "
            f"got {len(weights)}",
        )
    if "exo_pair" in losses and args.dpo_label_smoothing == 0.0:
        problems.add("dpo_label_smoothing", "exo_pair takes its logarithm; set it above 0, say 0.001")
    if args.dpo_label_smoothing and not set(losses) & set(SMOOTHED):
        problems.add("dpo_label_smoothing", f"none of {', '.join(losses)} reads it; remove it")
    for name, loss in (("discopop_tau", "discopop"), ("simpo_gamma", "simpo")):
        if loss not in losses and getattr(args, name) != keys_of(type(args))[name].default:
            problems.add(name, f"only dpo_loss_type: {loss} reads it; remove it")
