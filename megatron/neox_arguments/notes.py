"""What is said once at start: settings without effect here, and readings that differ from GPT-NeoX's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.declare import keys_of
from megatron.neox_arguments.ffn import ffn_width

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs


def notes(args: "NeoXArgs") -> list[str]:
    """Lines without a newline, none when there is nothing to say."""
    lines = []
    silent = _without_effect(type(args), args.given)
    if silent:
        lines.append("no effect here: " + "; ".join(f"{path} ({reason})" for path, reason in silent.items()))
    other = _upstream_width(args)
    if other is not None:
        lines.append(
            f"intermediate_size {args.ffn_size} ({args.origin('intermediate_size')}) is the true MLP width; GPT-NeoX "
            f"would build {other} from it (compat_ffn_width: upstream)"
        )
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


class _Upstream:
    """The view of a configuration in which upstream's width formula is asked for."""

    def __init__(self, args: "NeoXArgs") -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return "upstream" if name == "compat_ffn_width" else getattr(self._args, name)


def _upstream_width(args: "NeoXArgs") -> int | None:
    """The width GPT-NeoX trains with, where it differs from ours and nobody asked for either."""
    if args.compat_ffn_width is not None or args.intermediate_size is None:
        return None
    try:
        width = ffn_width(_Upstream(args))
    except ValueError:  # GPT-NeoX cannot run this configuration, so nobody expects its width
        return None
    return width if width != args.ffn_size else None
