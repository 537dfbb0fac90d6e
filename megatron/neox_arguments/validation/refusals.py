"""Finds values that are valid but cannot run: features that were removed, are impossible, or are not built
yet."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.neox_arguments.errors import format_value
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.ffn_width import ffn_width_error


def refusals(args: ResolvedArgs) -> dict[str, str]:
    """Returns the values that a run refuses: for each dotted path the reason and the fix. Empty if the
    configuration can run."""
    reasons = dict(_refused_values(type(args), args.user_values, args))
    if args.te_mha and not args.use_bias_in_attn_linear:
        reasons["te_mha"] = (
            "Transformer-Engine's attention has biases; set use_bias_in_attn_linear: true or remove te_mha"
        )
    if args.te_layernorm_mlp and not args.use_bias_in_mlp:
        reasons["te_layernorm_mlp"] = (
            "Transformer-Engine's MLP has biases; set use_bias_in_mlp: true or remove this key"
        )
    elif args.te_layernorm_mlp and args.activation not in ("gelu", "geglu", "relu", "reglu", "swiglu"):
        reasons["te_layernorm_mlp"] = f"Transformer-Engine's MLP has no activation {args.activation}; remove this key"
    width = ffn_width_error(args) if args.has_dense_blocks else None  # experts have their own key
    if width is not None:
        key = "intermediate_size" if args.intermediate_size else "activation"
        reasons["compat_ffn_width" if args.compat_ffn_width else key] = width
    return reasons


def _refused_values(
    declaration: type, user_values: Mapping[str, Any], args: ResolvedArgs | None, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    for name, value in user_values.items():
        key = keys_of(declaration)[name]
        if key.section is not None and isinstance(value, Mapping) and key.refusal(value) is None:
            yield from _refused_values(key.section, value, None, f"{prefix}{name}.")
            continue
        if args is not None:
            value = getattr(args, name) if name == "attention_config" else value
        reason = key.refusal(value)
        if reason is not None:
            refused = next((v for v in value if key.refusal(v)), value) if isinstance(value, tuple) else value
            fix = f"; remove it (--set {prefix}{name}=null)" if reason.endswith("not built yet") else ""
            yield prefix + name, f"{format_value(refused)} is refused: {reason}{fix}"
