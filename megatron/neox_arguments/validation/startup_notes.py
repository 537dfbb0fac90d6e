"""Finds the notes that a run prints at its start: keys without effect, and differences from GPT-NeoX."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.model import DROPOUT_KEYS
from megatron.neox_arguments.methods import declarations
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.data_split import cuts_listed_paths
from megatron.neox_arguments.values.losses import sample_kind

_FP8_TE_KEYS = ("te_fp8_amax_history_len", "te_fp8_amax_compute_algo", "te_fp8_margin")
_FP8_KEYS = (
    "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "output_layer_in_bf16", "te_fp8_format", "te_fp8_wgrad", *_FP8_TE_KEYS,
)  # fmt: skip


def startup_notes(args: ResolvedArgs) -> list[str]:
    """Returns the lines to print once at the start of a run: keys without effect, and differences from
    GPT-NeoX."""
    lines = []
    silent = _without_effect(type(args), args.user_values)
    if args.compat_no_save_optim:
        silent.pop("no_save_optim", None)
        place = args.origin("compat_no_save_optim")
        lines.append(
            f"compat_no_save_optim ({place}): checkpoints have no optimizer state; resuming needs no_load_optim: true"
        )
    if silent:
        lines.append("no effect here: " + "; ".join(f"{path} ({reason})" for path, reason in silent.items()))
    if args.weight_by_num_documents:
        formula = (
            "multiplied by 1 - n/N as in GPT-NeoX"
            if args.compat_weight_by_num_documents
            else ("proportional to (n/N)^alpha; GPT-NeoX multiplies by 1 - n/N (compat_weight_by_num_documents)")
        )
        lines.append(f"weights from document counts are {formula}")
    noted_elsewhere = ("compat_clip_one_is_off", "compat_no_save_optim", "compat_weight_by_num_documents")
    compat = [name for name in keys_of(type(args)) if name.startswith("compat_") and name not in noted_elsewhere]
    active = [name for name in compat if getattr(args, name) not in (keys_of(type(args))[name].default, "none")]
    if active:
        settings = ", ".join(f"{name} {args.user_values[name]} ({args.origin(name)})" for name in active)
        lines.append(f"compatible with GPT-NeoX's behaviour: {settings}")
    if args.lora is not None and args.lora["target"] == "all-linear" and args.moe_num_experts > 1:
        place = args.origin("moe_num_experts")
        lines.append(f"lora.target: all-linear leaves out routed experts and routers (moe_num_experts: {place})")
    if args.compat_clip_one_is_off and not args.gradient_clipping:
        lines.append("gradient_clipping 1.0 means no clipping (compat_clip_one_is_off)")
    if not (args.use_bias_in_norms or args.compat_norm_bias) and args.norm in ("layernorm", "te_layernorm"):
        place = args.origin("use_bias_in_norms")
        lines.append(f"use_bias_in_norms false ({place}): norms without biases; GPT-NeoX keeps them (compat_norm_bias)")
    if cuts_listed_paths(args):
        sentence = f"split {args.split} ({args.origin('split')}) cuts train, validation and test documents off each of"
        lines.append(f"{sentence} train_data_paths; GPT-NeoX reads it with data_path alone")
    dropouts = [name for name in DROPOUT_KEYS if args.user_values.get(name)]
    if dropouts and args.disable_dropout:
        is_set = args.user_values.get("disable_dropout") is not None
        cause = args.origin("disable_dropout") if is_set else f"train_impl: {args.train_impl}"
        settings = " and ".join(f"{name} {args.user_values[name]} ({args.origins[name]})" for name in dropouts)
        lines.append(f"disable_dropout ({cause}): trained without {settings}")
    te_layers = [name for name in ("te_mha", "te_layernorm_mlp") if getattr(args, name)]
    if te_layers and args.user_values.get("te_backend") != "native":
        layers = f"{' and '.join(te_layers)} ({args.origin(te_layers[0])})"
        lines.append(f"{layers}: runs as our own layers, with the same maths and parameter names in checkpoints")
    if args.te_layernorm_mlp:
        kind, epsilon = (
            ("rms_norm", args.rms_norm_epsilon) if "rms" in args.norm else ("layernorm", args.layernorm_epsilon)
        )
        if epsilon != {"rms_norm": 1e-8, "layernorm": 1e-5}[kind]:
            lines.append(
                f"te_layernorm_mlp: the MLP's norm has epsilon {'1e-8' if kind == 'rms_norm' else '1e-5'}, as in "
                f"GPT-NeoX, not {kind}_epsilon {epsilon} ({args.origin(f'{kind}_epsilon')})"
            )
    lines += [
        f"{name} ({args.origin(name)}) has no effect without {condition}" for name, condition in _inert_keys(args)
    ]
    return lines


def _inert_keys(args: ResolvedArgs) -> Iterator[tuple[str, str]]:
    """Yields (key, setting in words) for each key that was set but has no effect without that setting."""
    for name, condition, is_set in (
        ("checkpoint_in_cpu", "checkpoint_activations", args.checkpoint_activations),
        ("recompute_every", "checkpoint_activations", args.checkpoint_activations),
        ("lr_wsd_decay_style", "lr_decay_style: wsd", args.lr_decay_style == "wsd"),
        ("checkpoint_factor", "save", args.save is not None),
        ("split", "training on texts (tools/datasets/split.py splits pairs and answers)", sample_kind(args) == "texts"),
        *(condition for declaration in declarations() for condition in declaration.conditions(args)),
        ("memory_profiling_path", "memory_profiling", args.memory_profiling),
        ("hub_model_id", "push_to_hub: true", args.push_to_hub),
        ("hub_strategy", "push_to_hub: true", args.push_to_hub),
        ("wandb_mode", "use_wandb", args.use_wandb),
        ("comet_mode", "use_comet", args.use_comet),
        *((name, "precision_fp8 or te_fp8_mha", args.precision_fp8 != "off") for name in _FP8_KEYS),
        *((name, "precision_fp8: te", args.precision_fp8 in ("te", "off")) for name in _FP8_TE_KEYS),
    ):
        if name in args.user_values and args.user_values[name] != keys_of(type(args))[name].default and not is_set:
            yield name, condition


def _without_effect(declaration: type, user_values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    reasons: dict[str, str] = {}
    for name, value in user_values.items():
        key = keys_of(declaration)[name]
        if key.section is not None:
            reasons |= _without_effect(key.section, value, f"{prefix}{name}.")
        elif key.no_effect is not None and value != key.default:
            reasons[prefix + name] = key.no_effect
    return reasons
