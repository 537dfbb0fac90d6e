"""Checks the keys of losses of fine-tuning and preference training, and of the reference model."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.methods import train_impls
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import (
    losses_of,
    needs_reference,
    reference_mode,
    sample_kind,
    scores_reference,
)
from megatron.neox_arguments.values.remote_paths import is_remote


def validate_preferences(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the losses of the run, their options, and the reference model that they need."""
    _unread(args, problems)
    if args.neftune_noise_alpha:
        _noise(args, problems)
    if args.prefix_sharing is True and args.rotates_by_length and args.rope_scaling is not None:
        kind = args.rope_scaling["rope_type"]
        problems.add("prefix_sharing", f"rope_scaling {kind} depends on the length of a text, so two answers cannot "
                     "share a prompt; set auto, or false")  # fmt: skip
    if args.prefix_sharing is True and args.state_blocks:
        problems.add("prefix_sharing", f"blocks with states (attention_config {args.origin('attention_config')}) "
                     "cannot share the prompt of two answers; set auto, or false")  # fmt: skip
    if args.prefix_sharing is True and args.pack_impl != "best_fit":
        problems.add("prefix_sharing", "both answers of a pair must be in one row; set pack_impl: best_fit (now "
                                       f"{args.cite('pack_impl')})")  # fmt: skip
    _reference(args, problems)


def _unread(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Adds a problem for each key that is set but is an option of losses that the run does not use."""
    keys, chosen = keys_of(type(args)), losses_of(args)
    readers: dict[str, dict[str, list[str] | None]] = {}  # by option and train_impl, its losses; None: all
    for name, impl in train_impls().items():
        for option in (impl.key, *impl.options, *impl.online):
            readers.setdefault(option, {})[name] = None
        for loss, loss_spec in impl.losses.items():
            for option in loss_spec.options:
                option_losses = readers.setdefault(option, {}).setdefault(name, [])
                assert option_losses is not None, f"{option} is read by all losses of {name}"
                option_losses.append(loss)
    del readers[""]
    for option, impls in readers.items():
        if getattr(args, option) == keys[option].default:
            continue
        if option in train_impls()[args.train_impl].online and args.dataset_impl != "online":
            problems.add(option, f"is read only with dataset_impl: online, not {args.cite('dataset_impl')}; set that, "
                         "or remove it")  # fmt: skip
            continue
        if args.train_impl not in impls:
            readers_text = f"only train_impl: {' and '.join(impls)} {'reads' if len(impls) == 1 else 'read'}"
            problems.add(option, f"{readers_text} it, not {args.cite('train_impl')}; remove it")
            continue
        losses = impls[args.train_impl]
        if losses is not None and not set(losses) & set(chosen):
            key = train_impls()[args.train_impl].key
            readers_text = f"only {key}: {losses[0]}" if len(losses) == 1 else f"none of {', '.join(chosen)}"
            problems.add(option, f"{readers_text} reads it; remove it")


def _noise(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.train_impl != "normal":
        problems.add("neftune_noise_alpha", "is for fine-tuning on texts: a policy with noise cannot be compared "
                     f"with a reference without noise; remove it, or train_impl {args.cite('train_impl')}")  # fmt: skip
    elif args.pack_impl != "packed" and not args.reset_attention_mask:
        problems.add("neftune_noise_alpha", "needs the length of each document, which is unknown in rows with "
                     "several documents or padding; set reset_attention_mask: true")  # fmt: skip


def _reference(args: ResolvedArgs, problems: ErrorCollector) -> None:
    scored = scores_reference(args)
    for name in ("dpo_reference", "reference_cache_dir"):
        if getattr(args, name) == keys_of(type(args))[name].default:
            continue
        if not scored:
            reason = "precompute_model_name provides them" if needs_reference(args) else "the losses need none"
            problems.add(name, f"is for log-probabilities of a reference model, but {reason}; remove it")
        elif name == "reference_cache_dir" and reference_mode(args) != "cache":
            problems.add(name, f"is read only with dpo_reference: cache, not {args.cite('dpo_reference')}; remove it")
    if not scored:
        return
    if args.lora is not None and args.dpo_reference == "cache":
        problems.add("dpo_reference", "cache cannot be used with lora, where the reference is the model without "
                                      "adapters, computed in every step; remove it")  # fmt: skip
    if args.dpo_reference == "cache" and sample_kind(args) == "generated":
        problems.add("dpo_reference", "cache is for answers from files, but the model writes them; set on_the_fly, "
                                      "or remove it")  # fmt: skip
    if args.save is not None and is_remote(args.load):
        problems.add("load", "is remote, but a resumed run reads it again as its reference model; download it, and set "
                             "load to the local folder")  # fmt: skip
