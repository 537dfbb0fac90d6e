"""Keys of FP8: by which recipe linear layers multiply 8-bit operands, and which of them do."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.keys.declaration import key, new_key

_ATTENTION_TOO = (
    "GPT-NeoX gives the blocks to Transformer-Engine's autocast; here all linears of the blocks are in FP8, and "
    "attention's own products stay in bf16"
)


@dataclass(frozen=True)
class FP8Keys:
    """FP8 products of linear layers; weights, gradients and checkpoints stay bf16 and fp32."""

    precision_fp8: Literal["auto", "off", "tensorwise", "rowwise", "mxfp8", "te"] = new_key(
        None,
        "FP8 products of the blocks' linears: a scale a matrix (tensorwise), a row (rowwise) or 32 values (mxfp8), or "
        "Transformer-Engine's delayed scaling (te); auto: that of the run it goes on from, else tensorwise on Hopper "
        "where a trial at the start finds it faster than bf16; unset: te with te_fp8_mha, else off",
    )
    first_last_layers_bf16: bool = new_key(
        True, "FP8: the first and last blocks stay in bf16, as many as num_layers_at_*_in_bf16 say (Megatron)"
    )
    num_layers_at_start_in_bf16: int = new_key(1, "FP8: first blocks that stay in bf16 (Megatron)", ge=0)
    num_layers_at_end_in_bf16: int = new_key(1, "FP8: last blocks that stay in bf16 (Megatron)", ge=0)
    output_layer_in_bf16: bool = new_key(
        True, "FP8: the output layer stays in bf16; false: it multiplies by the recipe of the blocks"
    )
    te_fp8_mha: bool = key(False, "FP8 by the recipe te, unless precision_fp8 is set", differs=_ATTENTION_TOO)
    te_fp8_format: Literal["hybrid", "e4m3"] = key(
        "hybrid", "FP8 by tensorwise or te: gradients in E5M2 (hybrid), or in E4M3 as all else"
    )
    te_fp8_wgrad: bool = key(True, "FP8: compute gradients of weights in FP8, too; false: in bf16")
    te_fp8_amax_history_len: int = key(1, "FP8 by te: steps whose largest magnitudes are remembered", ge=1)
    te_fp8_amax_compute_algo: Literal["max", "most_recent"] = key(
        "most_recent", "FP8 by te: a scale comes from the largest remembered magnitude, or the last"
    )
    te_fp8_margin: int = key(
        0,
        "FP8 by te: divide scales by 2 to the power of this",
        ge=-64,
        le=64,
        unread="acts with FP8 alone, which no run of theirs had: the code there reads another name and stops",
    )
