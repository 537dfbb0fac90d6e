"""Computes the inner width of the MLP. `intermediate_size` differs in meaning here, in GPT-NeoX and in its
fork."""

from collections.abc import Mapping
from typing import Any, Final

from megatron.neox_arguments.keys.declaration import keys_of

GATED: Final = ("geglu", "geglu_tanh", "reglu", "swiglu", "swigluoai", "bilinear", "glu")
CONVENTIONS: Final = ("none", "upstream", "fork")
# Widths of gated MLPs by hidden_size, from the published model configurations.
PUBLISHED: Final = {
    576: {1536: "SmolLM 135M"},
    896: {4864: "Qwen2 0.5B"},
    960: {2560: "SmolLM 360M"},
    1536: {8960: "Qwen2 1.5B"},
    2048: {5632: "TinyLlama 1.1B", 8192: "Llama 3.2 1B", 11008: "SmolLM3 3B", 16384: "Gemma 2B"},
    3072: {8192: "Llama 3.2 3B", 24576: "Gemma 7B"},
    3584: {18944: "Qwen2 7B"},
    4096: {11008: "LLaMA 7B", 12288: "Qwen3 8B", 14336: "Mistral 7B"},
    5120: {13824: "LLaMA 13B", 27648: "OLMo 2 32B"},
    6656: {17920: "LLaMA 30B"},
    7168: {20480: "Yi 34B"},
    8192: {22016: "LLaMA 65B", 28672: "Llama 2 70B", 29568: "Qwen2 72B"},
    16384: {53248: "Llama 3.1 405B"},
}


def ffn_width(values: Any, convention: str | None = None) -> int | tuple[int, ...]:
    """Returns the true inner width of the MLP: a number, or a number for each layer if intermediate_size is a
    list.

    values: a configuration, `ResolvedArgs`. convention: the meaning of the keys (none, upstream or fork), as
    in compat_ffn_width; None: as configured. Raises ValueError if the keys contradict each other.
    """
    intermediate_size = values.intermediate_size
    if isinstance(intermediate_size, tuple):
        return tuple(_width(values, layer_size, convention) for layer_size in intermediate_size)
    return _width(values, intermediate_size, convention)


def _width(values: Any, intermediate_size: int | None, convention: str | None) -> int:
    """Returns the true inner width: rows of the up projection, which are columns of the down projection.

    convention: by which rule to compute the width.

    "none": intermediate_size. If that is unset: 4 * hidden_size (or expansion_factor * hidden_size), two
    thirds
        of that for gated activations, rounded up to a multiple of mlp_multiple_of. This is LLaMA's rule:
        hidden_size 4096 and multiples of 256 give 11008.
    "upstream", "fork": the formulas of GPT-NeoX ea7aefd8 and of the geodesic fork c43cf19.
    None: compat_ffn_width, else "fork" if the file sets a key that only the fork has, else "none".

    Raises ValueError if the keys contradict each other.
    """
    convention = convention or values.compat_ffn_width or ("fork" if _written_for_the_fork(values) else "none")
    multiple = values.mlp_multiple_of
    gated = values.activation in GATED
    base = intermediate_size or int((values.expansion_factor or 4) * values.hidden_size)
    if convention != "none" and (values.te_layernorm_mlp or (intermediate_size and convention == "fork")):
        return base
    if convention != "none":
        return _upstream_width(base, multiple, gated)
    if intermediate_size is None:
        return _round_up(int(base * 2 / 3) if gated else base, multiple)
    if intermediate_size % multiple:
        raise ValueError(
            f"intermediate_size {intermediate_size}, the MLP's true width, is not a multiple of mlp_multiple_of "
            f"{multiple}; set it to {_round_up(intermediate_size, multiple)}, remove mlp_multiple_of, or set "
            "compat_ffn_width: upstream"
        )
    return intermediate_size


def ffn_width_error(values: Any) -> str | None:
    """Returns why the MLP's width is unclear or impossible, with the line to add; None if it is clear.

    The width is unclear if the rules of this project, GPT-NeoX and its fork give different widths. A rule
    does not count if its width cannot run: by GPT-NeoX's rule the two linears may not fit each other.
    """
    cannot = None
    try:
        ffn_width(values)
    except ValueError as cause:
        cannot = str(cause)
    if values.compat_ffn_width is not None or _written_for_the_fork(values):
        return cannot
    widths: dict[str, int | tuple[int, ...]] = {}
    for convention in CONVENTIONS:
        try:
            widths[convention] = ffn_width(values, convention)
        except ValueError:
            continue
    if len(set(widths.values())) < 2:
        return cannot
    names = {"none": "as written", "upstream": "in GPT-NeoX", "fork": "in its geodesic fork"}
    candidates = ", ".join(f"{width} {names[convention]}" for convention, width in widths.items())
    published: Mapping[Any, str] = PUBLISHED.get(values.hidden_size, {})
    fitting = [convention for convention, width in widths.items() if width in published]
    if fitting:
        width = widths[fitting[0]]
        advice = f"{width} is the width of {published[width]}: add the line `compat_ffn_width: {fitting[0]}`"
    else:
        advice = (
            "add the line `compat_ffn_width: none` for a new model, or with upstream or fork for a model trained there"
        )
    return f"the MLP's width is unclear: {candidates}; {advice}"


def _written_for_the_fork(values: Any) -> bool:
    """Returns whether a configuration sets intermediate_size and a key that only GPT-NeoX's geodesic fork
    has. If so, intermediate_size is the true width."""
    keys = keys_of(type(values))
    return values.intermediate_size is not None and any(keys[name].source == "fork" for name in values.user_values)


def _upstream_width(base: int, multiple: int, gated: bool) -> int:
    """Returns the MLP's width by the formula of GPT-NeoX's ParallelMLP. Raises ValueError if its two linears
    do not fit.

    The output of the first linear is rounded up to a multiple of 2 * `multiple`, the input of the second
    linear to a multiple of `multiple`.
    """
    rows = int(base * 2 / 3) if gated else base
    columns = _round_up(rows // 2 if gated else rows, multiple)
    rows = _round_up(rows, 2 * multiple)
    if (rows // 2 if gated else rows) != columns:
        raise ValueError(
            f"by GPT-NeoX's formula an MLP of width {base} has a first linear of {rows} rows and a second of {columns} "
            "columns, which cannot run; remove compat_ffn_width and set intermediate_size to the true width"
        )
    return columns


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
