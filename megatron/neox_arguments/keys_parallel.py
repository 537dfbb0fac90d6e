"""Keys that say how many processes there are, how they start, and how the model and the batch are split over them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.declare import key
from megatron.neox_arguments.sections import ZeroOptimization

_STARTER = "deepy.py starts the ranks of this machine; srun and mpirun start train.py themselves"


@dataclass(frozen=True)
class RunnerKeys:
    hostfile: str | None = key(None, "File with one `host slots=N` a line; ranks are started on this machine only")
    include: str | None = key(None, "Devices to use, as in `localhost:2,3`")
    exclude: str | None = key(None, "Devices not to use, as in `localhost:0`")
    num_nodes: int = key(-1, "Machines to start ranks on; -1 and 1: this one, more is not built yet", ge=-1)
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = key(
        "pdsh", "What starts ranks on other machines", no_effect=_STARTER
    )
    force_multi: bool = key(False, "Start over ssh even on one machine", no_effect=_STARTER)
    no_ssh_check: bool = key(False, "Do not try ssh first", no_effect=_STARTER)
    deepspeed_slurm: bool = key(False, "Ranks are started by Slurm", no_effect=_STARTER)
    deepspeed_mpi: bool = key(False, "Ranks are started by MPI", no_effect=_STARTER)
    comment: str | None = key(None, "Slurm's --comment", no_effect=_STARTER)
    account: str | None = key(None, "Slurm's --account", no_effect=_STARTER)
    num_gpus: int | None = key(None, "Ranks to start on this machine; unset: one a visible GPU, or one", ge=1)
    master_addr: str | None = key(None, "Address at which the ranks meet; unset: this machine")
    master_port: int = key(29500, "Port at which the ranks meet", ge=1, le=65535)
    max_restarts: int = key(
        0, "Times that deepy.py starts a failed run again; it goes on from `save`", ge=0, source="new"
    )
    first_step_timeout_mins: float = key(
        30.0,
        "How long ranks wait for each other until the first step is done, and while they save or validate",
        gt=0,
        source="new",
    )
    collective_timeout_s: float = key(
        40.0,
        "How long ranks wait for each other in later steps; never less than three times the longest step",
        gt=0,
        source="new",
    )


@dataclass(frozen=True)
class ParallelKeys:
    pipe_parallel_size: int = key(
        0,
        "Pipeline stages; 0 and 1: no pipeline",
        ge=0,
        differs="GPT-NeoX trains 1 through DeepSpeed's pipeline engine and 0 without; here both are the same",
    )
    model_parallel_size: int = key(1, "Tensor-parallel ranks each layer is split over", ge=1)
    pipe_partition_method: str = key(
        "type:transformer|mlp", "What is balanced over pipeline stages: `type:REGEX` layers, `uniform` or `parameters`"
    )
    sequence_parallel: bool = key(False, "Also split the sequence between tensor-parallel regions (Megatron)")
    distributed_backend: Literal["auto", "nccl", "gloo", "mpi"] = key(
        "auto",
        "Collectives; auto: nccl on GPUs, gloo on CPUs",
        refuse_values={"mpi": "torch is built without it; write auto"},
    )
    zero_optimization: Mapping[str, Any] = key(
        None, "ZeRO: what data-parallel ranks share out instead of copying", section=ZeroOptimization
    )


@dataclass(frozen=True)
class BatchKeys:
    """Any two of the three give the third once the data-parallel size is known (`NeoXArgs.for_world`)."""

    train_batch_size: int = key(None, "Samples of one optimizer step over all ranks", ge=1)
    train_micro_batch_size_per_gpu: int = key(None, "Samples of one forward pass of one data-parallel rank", ge=1)
    gradient_accumulation_steps: int = key(
        None,
        "Forward passes of one optimizer step; 1 when it cannot be derived",
        ge=1,
        differs="GPT-NeoX never derives it, so train_batch_size needs it there",
    )
