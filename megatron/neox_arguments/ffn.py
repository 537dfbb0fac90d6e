"""The inner width of the MLP; GPT-NeoX computes five different widths from the same keys."""

from typing import Any, Final

GATED: Final = ("geglu", "reglu", "swiglu", "bilinear", "glu")


def ffn_width(values: Any) -> int:
    """True inner width: rows of the up projection, columns of the down projection.

    intermediate_size as it is; else 4 * hidden_size (or expansion_factor * hidden_size), for gated activations two
    thirds of that, rounded up to mlp_multiple_of (LLaMA's rule: hidden 4096, multiple of 256 -> 11008).
    With compat_ffn_width the formulas of GPT-NeoX upstream ea7aefd8 or of the geodesic fork.
    Raises ValueError when the keys contradict each other.
    """
    given, multiple = values.intermediate_size, values.mlp_multiple_of
    gated = values.activation in GATED
    base = given or int((values.expansion_factor or 4) * values.hidden_size)
    if values.compat_ffn_width is not None and (values.compat_ffn_width == "upstream" or not gated or not given):
        return _upstream_width(base, multiple, gated)
    if values.compat_ffn_width == "fork":
        return _round_up(base, multiple)
    if given is None:
        return _round_up(int(base * 2 / 3) if gated else base, multiple)
    if given % multiple:
        raise ValueError(
            f"is the true width and is not a multiple of mlp_multiple_of {multiple}; write "
            f"{_round_up(given, multiple)}, drop mlp_multiple_of, or say compat_ffn_width: upstream"
        )
    return given


def _upstream_width(base: int, multiple: int, gated: bool) -> int:
    """ParallelMLP: the first linear is rounded to 2 * multiple, the input of the second to multiple."""
    rows = int(base * 2 / 3) if gated else base
    columns = _round_up(rows // 2 if gated else rows, multiple)
    rows = _round_up(rows, 2 * multiple)
    if (rows // 2 if gated else rows) != columns:
        raise ValueError(
            f"GPT-NeoX makes a first linear of {rows} rows and a second of {columns} columns from {base}, which cannot "
            "run; drop compat_ffn_width and write the true width as intermediate_size"
        )
    return columns


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
