"""Declares the keys of FP8: which linear layers multiply 8-bit operands, and by which recipe."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.keys.declaration import key, new_key

_FP8_LINEARS = (
    "GPT-NeoX gives the blocks to Transformer-Engine's autocast; here all linears of the blocks are in FP8, and "
    "attention's own products stay in bf16"
)


@dataclass(frozen=True)
class FP8Keys:
    """Configuration keys of FP8 products in linear layers. Weights, gradients and checkpoints stay in bf16
    and fp32."""

    precision_fp8: Literal["auto", "off", "tensorwise", "rowwise", "mxfp8", "te"] = new_key(
        None,
        "FP8 products in the blocks' linears. One scale per matrix (tensorwise), row (rowwise) or 32 values "
        "(mxfp8), or Transformer-Engine's delayed scaling (te). auto: a resumed run keeps its recipe; else "
        "tensorwise on Hopper if a trial at the start beats bf16. Unset: te with te_fp8_mha, else off",
    )
    first_last_layers_bf16: bool = new_key(
        True, "FP8: keep the first and last blocks in bf16, as many as num_layers_at_*_in_bf16 say (Megatron)"
    )
    num_layers_at_start_in_bf16: int = new_key(1, "FP8: number of first blocks in bf16 (Megatron)", ge=0)
    num_layers_at_end_in_bf16: int = new_key(1, "FP8: number of last blocks in bf16 (Megatron)", ge=0)
    output_layer_in_bf16: bool = new_key(
        True, "FP8: keep the output layer in bf16; false: use the recipe of the blocks"
    )
    te_fp8_mha: bool = key(False, "FP8 by the recipe te, unless precision_fp8 is set", differs=_FP8_LINEARS)
    te_fp8_format: Literal["hybrid", "e4m3"] = key(
        "hybrid", "FP8 by tensorwise or te: gradients in E5M2 (hybrid), or in E4M3 like all else"
    )
    te_fp8_wgrad: bool = key(True, "FP8: also compute weight gradients in FP8; false: in bf16")
    te_fp8_amax_history_len: int = key(1, "FP8 by te: length of the history of largest magnitudes, in steps", ge=1)
    te_fp8_amax_compute_algo: Literal["max", "most_recent"] = key(
        "most_recent", "FP8 by te: take a scale from the largest remembered magnitude, or the last"
    )
    te_fp8_margin: int = key(
        0,
        "FP8 by te: divide scales by 2 to the power of this",
        ge=-64,
        le=64,
        unread="acts only with FP8; GPT-NeoX's own FP8 runs stop, because its code reads another name",
    )
