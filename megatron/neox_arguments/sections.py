"""The sub-keys of the keys that are mappings: optimizer, zero_optimization, fp16, bf16, data_types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.declare import REQUIRED, key

_NO_OFFLOAD = "offloading is not built; remove the sub-key"
_BF16_SCALE = "bf16 needs no loss scale"


@dataclass(frozen=True)
class OptimizerParams:
    lr: float = key(REQUIRED, "Peak learning rate", ge=0)
    betas: tuple[float, ...] = key(None, "Adam, AdamW, Lion: decay rates; [0.9, 0.999] when unset, Lion [0.9, 0.99]")
    eps: float = key(None, "Adam, AdamW: term added to the denominator; 1e-8 when unset", gt=0)
    momentum: float = key(None, "SGD: momentum; 0 when unset", ge=0)


@dataclass(frozen=True)
class Optimizer:
    type: Literal["Adam", "AdamW", "SGD", "Lion"] = key(
        "Adam",
        "Optimizer. Adam is AdamW: weight decay is decoupled, as in GPT-NeoX",
        later=("OneBitAdam", "CPU_Adam", "CPU_Torch_Adam", "SM3", "madgrad_wd"),
    )
    params: Mapping[str, Any] = key(REQUIRED, "Parameters of the optimizer", section=OptimizerParams)


@dataclass(frozen=True)
class ZeroOptimization:
    stage: int = key(
        0, "What data-parallel ranks share out: 0 nothing, 1 optimizer, 2 +gradients, 3 +weights", ge=0, le=3
    )
    allgather_partitions: bool = key(True, "Gather updated weights with all-gather instead of broadcasts")
    allgather_bucket_size: int = key(500_000_000, "Elements gathered at once", gt=0)
    reduce_scatter: bool = key(True, "Average gradients with reduce-scatter instead of all-reduce")
    reduce_bucket_size: int = key(500_000_000, "Elements reduced at once", gt=0)
    overlap_comm: bool = key(False, "Reduce gradients while backward still runs")
    contiguous_gradients: bool = key(False, "Copy gradients to one buffer as they are made")
    round_robin_gradients: bool = key(False, "Stage 1 and 2: spread gradient copies over the ranks")
    sub_group_size: int = key(1_000_000_000, "Stage 3: parameters updated at once", gt=0)
    stage3_prefetch_bucket_size: int = key(50_000_000, "Stage 3: elements fetched ahead", ge=0)
    stage3_param_persistence_threshold: int = key(100_000, "Stage 3: smaller parameters stay whole", ge=0)
    stage3_max_live_parameters: int = key(1_000_000_000, "Stage 3: parameters resident before release", ge=0)
    stage3_max_reuse_distance: int = key(1_000_000_000, "Stage 3: keep a parameter reused within this many", ge=0)
    cpu_offload: bool = key(False, "Old spelling of offload_optimizer", refuse=_NO_OFFLOAD)
    offload_optimizer: Mapping[str, Any] | None = key(None, "Optimizer state on the CPU", refuse=_NO_OFFLOAD)
    offload_param: Mapping[str, Any] | None = key(None, "Weights on the CPU", refuse=_NO_OFFLOAD)


@dataclass(frozen=True)
class Fp16:
    enabled: bool = key(None, "Train in fp16; true when `precision: fp16`")
    fp16: bool = key(True, "Written by many GPT-NeoX files", no_effect="`enabled` decides")
    type: Literal["fp16"] = key("fp16", "Written by many GPT-NeoX files", no_effect="`enabled` decides")
    auto_cast: bool = key(False, "Cast inputs to fp16", no_effect="inputs are token numbers")
    loss_scale: float = key(0.0, "Fixed loss scale; 0 for dynamic scaling", ge=0)
    initial_scale_power: int = key(16, "Dynamic scaling starts at 2 to this power", ge=0)
    loss_scale_window: int = key(1000, "Steps without overflow before the scale is doubled", gt=0)
    hysteresis: int = key(2, "Overflows before the scale is halved", ge=1)
    consecutive_hysteresis: bool = key(False, "Refill the hysteresis at every step without overflow")
    min_loss_scale: float = key(1.0, "Dynamic scaling never goes below", gt=0)


@dataclass(frozen=True)
class Bf16:
    enabled: bool = key(None, "Train in bf16; true when `precision: bfloat16`")
    bf16: bool = key(True, "Written by some GPT-NeoX files", no_effect="`enabled` decides")
    type: Literal["bfloat16"] = key("bfloat16", "Written by some GPT-NeoX files", no_effect="`enabled` decides")
    loss_scale: float = key(0.0, "As in fp16", no_effect=_BF16_SCALE)
    initial_scale_power: int = key(0, "As in fp16", no_effect=_BF16_SCALE)
    loss_scale_window: int = key(1000, "As in fp16", no_effect=_BF16_SCALE)
    hysteresis: int = key(2, "As in fp16", no_effect=_BF16_SCALE)
    min_loss_scale: float = key(1.0, "As in fp16", no_effect=_BF16_SCALE)


@dataclass(frozen=True)
class DataTypes:
    grad_accum_dtype: Literal["fp32"] = key("fp32", "Type gradients are summed in; always fp32", later=("bf16", "fp16"))
