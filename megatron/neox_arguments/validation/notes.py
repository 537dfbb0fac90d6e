"""What is said once at start: settings without effect here, and readings that differ from GPT-NeoX's."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.model import DROPOUT_KEYS
from megatron.neox_arguments.resolved import ResolvedArgs


def notes(args: ResolvedArgs) -> list[str]:
    """Lines without a newline, none when there is nothing to say."""
    lines = []
    silent = _without_effect(type(args), args.given)
    if silent:
        lines.append("no effect here: " + "; ".join(f"{path} ({reason})" for path, reason in silent.items()))
    if args.weight_by_num_documents:
        how = (
            "multiplied by 1 - n/N as in GPT-NeoX"
            if args.compat_weight_by_num_documents
            else ("proportional to (n/N)^alpha; GPT-NeoX multiplies by 1 - n/N (compat_weight_by_num_documents)")
        )
        lines.append(f"weights from document counts are {how}")
    told_below = ("compat_clip_one_is_off", "compat_weight_by_num_documents")
    compat = [name for name in keys_of(type(args)) if name.startswith("compat_") and name not in told_below]
    kept = [name for name in compat if getattr(args, name) not in (keys_of(type(args))[name].default, "none")]
    if kept:
        told = ", ".join(f"{name} {args.given[name]} ({args.origin(name)})" for name in kept)
        lines.append(f"as GPT-NeoX did it: {told}")
    if args.compat_clip_one_is_off and not args.gradient_clipping:
        lines.append("gradient_clipping 1.0 is read as none (compat_clip_one_is_off)")
    given = [name for name in DROPOUT_KEYS if args.given.get(name)]
    if given and args.disable_dropout:
        asked = args.given.get("disable_dropout") is not None
        why = args.origin("disable_dropout") if asked else f"train_impl: {args.train_impl}"
        told = " and ".join(f"{name} {args.given[name]} ({args.origins[name]})" for name in given)
        lines.append(f"disable_dropout ({why}): trained without {told}")
    te_layers = [name for name in ("te_mha", "te_layernorm_mlp") if getattr(args, name)]
    if te_layers and args.given.get("te_backend") != args.te_backend:
        by = f"{' and '.join(te_layers)} ({args.origin(te_layers[0])})"
        lines.append(
            f"te_backend: auto chose {args.te_backend} for {by}: our own layers, the same maths and names on disk"
        )
    if args.te_layernorm_mlp:
        kind, epsilon = (
            ("rms_norm", args.rms_norm_epsilon) if "rms" in args.norm else ("layernorm", args.layernorm_epsilon)
        )
        if epsilon != {"rms_norm": 1e-8, "layernorm": 1e-5}[kind]:
            lines.append(
                f"te_layernorm_mlp: the MLP's norm adds {'1e-8' if kind == 'rms_norm' else '1e-5'}, as GPT-NeoX has it "
                f"there, not {kind}_epsilon {epsilon} ({args.origin(f'{kind}_epsilon')})"
            )
    lines += [f"{name} ({args.origin(name)}) has no effect without {other}" for name, other in _alone(args)]
    return lines


def _alone(args: ResolvedArgs) -> Iterator[tuple[str, str]]:
    """Keys that were set and only act beside another one that is not."""
    engine = args.te_mha or args.te_layernorm_mlp
    for name, other, there in (
        ("checkpoint_in_cpu", "checkpoint_activations", args.checkpoint_activations),
        ("lr_wsd_decay_style", "lr_decay_style: wsd", args.lr_decay_style == "wsd"),
        ("checkpoint_factor", "save", args.save is not None),
        ("memory_profiling_path", "memory_profiling", args.memory_profiling),
        ("wandb_mode", "use_wandb", args.use_wandb),
        ("comet_mode", "use_comet", args.use_comet),
        ("te_backend", "te_mha or te_layernorm_mlp", engine),
    ):
        if name in args.given and args.given[name] != keys_of(type(args))[name].default and not there:
            yield name, other


def _without_effect(declaration: type, given: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in given.items():
        key = keys_of(declaration)[name]
        if key.section is not None:
            found |= _without_effect(key.section, value, f"{prefix}{name}.")
        elif key.no_effect is not None and value != key.default:
            found[prefix + name] = key.no_effect
    return found
