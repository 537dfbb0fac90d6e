"""What is said once at start: settings without effect here, and readings that differ from GPT-NeoX's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.declare import keys_of

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs


def notes(args: "NeoXArgs") -> list[str]:
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
    if args.given.get("gradient_clipping") and not args.gradient_clipping:
        lines.append("gradient_clipping 1.0 is read as none (compat_clip_one_is_off)")
    return lines


def _without_effect(declaration: type, given: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in given.items():
        key = keys_of(declaration)[name]
        if key.section is not None:
            found |= _without_effect(key.section, value, f"{prefix}{name}.")
        elif key.no_effect is not None and value != key.default:
            found[prefix + name] = key.no_effect
    return found
