"""Keys that say how many processes there are, how they start, and how the model and the batch are split over
them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.sections import ZeroOptimization

_HOSTS = (
    "DeepSpeed's pdsh starts one deepy.py a host instead of DeepSpeed's launcher: logs by rank, one end for all hosts"
)


@dataclass(frozen=True)
class RunnerKeys:
    """On which machines and devices a run is started, and by what."""

    hostfile: str | None = key(
        None, "File with one `host slots=N` a line; unset: DLTS_HOSTFILE, or /job/hostfile where it is", differs=_HOSTS
    )
    include: str | None = key(None, "Devices to use, as in `localhost:2,3`, or slots of hosts, as in `a:2,3@b`")
    exclude: str | None = key(None, "Devices not to use, as in `localhost:0`, or slots of hosts, as in `a:0@b`")
    num_nodes: int = key(
        -1, "Machines: the first of a hostfile, or how many the same line is typed on (`--node_rank`); -1: all", ge=-1
    )
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm", "torchrun"] = key(
        "pdsh",
        "What starts ranks on a hostfile's machines; slurm: srun, inside an allocation; torchrun: also on one machine",
        differs="one machine needs none of them: deepy.py starts its ranks itself, but with slurm and torchrun",
    )
    force_multi: bool = key(False, "Start through `launcher` even on one machine of a hostfile")
    no_ssh_check: bool = key(False, "Do not try ssh first")
    deepspeed_slurm: bool = key(False, "The same as `launcher: slurm`")
    deepspeed_mpi: bool = key(False, "The same as `launcher: openmpi`")
    comment: str | None = key(None, "Slurm's --comment")
    account: str | None = key(None, "Slurm's --account")
    num_gpus: int | None = key(None, "Ranks to start on each machine; unset: one a visible GPU, or one", ge=1)
    master_addr: str | None = key(None, "Address at which the ranks meet; unset: the first machine")
    master_port: int = key(29500, "Port at which the ranks meet", ge=1, le=65535)
    max_restarts: int = new_key(0, "Times that deepy.py starts a failed run again; it goes on from `save`", ge=0)
    rendezvous_timeout_s: float = new_key(
        45.0, "How long machines and ranks wait at start for the next one, after the latest that came", gt=0
    )
    first_step_timeout_mins: float = new_key(
        30.0, "How long ranks wait for each other until the first step is done, and while they save or validate", gt=0
    )
    collective_timeout_s: float = new_key(
        40.0, "How long ranks wait for each other in later steps; never less than three times the longest step", gt=0
    )
    min_allreduce_gb_s: float | None = new_key(
        None,
        "Bus bandwidth that an all-reduce of all ranks must reach before training starts; unset: "
        "NEOX_MIN_ALLREDUCE_GB_S of the environment, which a site's file sets, else it is only said",
        gt=0,
    )


@dataclass(frozen=True)
class ParallelKeys:
    """Over how many ranks the model is split, and how."""

    engine: Literal["auto", "native", "deepspeed"] = new_key(
        "auto",
        "What trains: native (torch alone), deepspeed; auto: that of the run it goes on from, else native on CPUs and "
        "on one GPU where it can, deepspeed on several GPUs",
    )
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
    async_tensor_parallel: Literal["auto"] | bool = new_key(
        False,
        "With sequence_parallel on GPUs of one machine that read each other's memory (NVLink): gather and scatter in "
        "pieces, while the linear's product computes others, by torch's symmetric memory; linears in FP8 do without. "
        "auto: where that can be had, on GPUs that it has run on: none so far",
    )
    distributed_backend: Literal["auto", "nccl", "gloo", "mpi"] = key(
        "auto",
        "Collectives, and with them the device; auto: nccl on GPUs, gloo on CPUs; gloo: CPUs, also beside GPUs",
        differs="GPT-NeoX needs GPUs for nccl; here nccl is gloo on a machine that has none",
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
