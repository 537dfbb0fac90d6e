"""Keys that say how many processes there are, how they start, and how the model and the batch are split over them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.declare import key
from megatron.neox_arguments.sections import ZeroOptimization


@dataclass(frozen=True)
class RunnerKeys:
    hostfile: str | None = key(None, "File with one `host slots=N` a line; ranks are started on this machine only")
    include: str | None = key(None, "Devices to use, as in `localhost:2,3`")
    num_gpus: int | None = key(None, "Ranks to start on this machine; unset: one a visible GPU, or one", ge=1)
    master_addr: str | None = key(None, "Address at which the ranks meet; unset: this machine")
    master_port: int = key(29500, "Port at which the ranks meet", ge=1, le=65535)
    max_restarts: int = key(0, "Times that deepy.py starts a failed run again; it goes on from `save`", ge=0)
    first_step_timeout_mins: float = key(
        30.0, "How long ranks wait for each other until the first step is done, and while they save or validate", gt=0
    )
    collective_timeout_s: float = key(
        40.0, "How long ranks wait for each other in later steps; never less than three times the longest step", gt=0
    )


@dataclass(frozen=True)
class ParallelKeys:
    pipe_parallel_size: int = key(0, "Pipeline stages; 0 and 1 are the same: no pipeline", ge=0)
    model_parallel_size: int = key(1, "Tensor-parallel ranks each layer is split over", ge=1)
    pipe_partition_method: str = key(
        "type:transformer|mlp", "What is balanced over pipeline stages: `type:REGEX` layers, `uniform` or `parameters`"
    )
    sequence_parallel: bool = key(False, "Also split the sequence between tensor-parallel regions (Megatron)")
    distributed_backend: Literal["auto", "nccl", "gloo"] = key("auto", "Collectives; auto: nccl on GPUs, gloo on CPUs")
    zero_optimization: Mapping[str, Any] = key(
        None, "ZeRO: what data-parallel ranks share out instead of copying", section=ZeroOptimization
    )


@dataclass(frozen=True)
class BatchKeys:
    """Any two of the three give the third once the data-parallel size is known (`NeoXArgs.for_world`)."""

    train_batch_size: int = key(None, "Samples of one optimizer step over all ranks", ge=1)
    train_micro_batch_size_per_gpu: int = key(None, "Samples of one forward pass of one data-parallel rank", ge=1)
    gradient_accumulation_steps: int = key(
        None, "Forward passes of one optimizer step; 1 when it cannot be derived", ge=1
    )
