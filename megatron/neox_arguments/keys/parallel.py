"""Declares the keys of how ranks are started, and of how the model and the batch are split over them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.sections import ZeroOptimization

_HOSTS = (
    "DeepSpeed's pdsh starts one deepy.py per host, not DeepSpeed's launcher: logs per rank, and all hosts end together"
)


@dataclass(frozen=True)
class RunnerKeys:
    """Configuration keys of the machines, GPUs and launcher with which a run is started."""

    hostfile: str | None = key(
        None,
        "File with one `host slots=N` per line; unset: DLTS_HOSTFILE, or /job/hostfile if it exists",
        differs=_HOSTS,
    )
    include: str | None = key(None, "Devices to use, as in `localhost:2,3`, or slots of hosts, as in `a:2,3@b`")
    exclude: str | None = key(None, "Devices not to use, as in `localhost:0`, or slots of hosts, as in `a:0@b`")
    num_nodes: int = key(
        -1, "Machines: the first of a hostfile, or the number you start by hand (`--node_rank`); -1: all", ge=-1
    )
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm", "torchrun"] = key(
        "pdsh",
        "Starts ranks on a hostfile's machines. slurm: srun, inside an allocation; torchrun: also on one machine",
        differs="on one machine deepy.py starts the ranks itself, except with slurm and torchrun",
    )
    force_multi: bool = key(False, "Start through `launcher` even on one machine of a hostfile")
    no_ssh_check: bool = key(False, "Do not check first whether ssh reaches the machines without a password")
    deepspeed_slurm: bool = key(False, "The same as `launcher: slurm`")
    deepspeed_mpi: bool = key(False, "The same as `launcher: openmpi`")
    comment: str | None = key(None, "Slurm's --comment")
    account: str | None = key(None, "Slurm's --account")
    num_gpus: int | None = key(None, "Ranks to start on each machine; unset: one per visible GPU, or one", ge=1)
    master_addr: str | None = key(None, "Meeting address of the ranks; unset: the first machine")
    master_port: int = key(29500, "Meeting port of the ranks", ge=1, le=65535)
    max_restarts: int = new_key(0, "Restarts of a failed run by deepy.py; each resumes from `save`", ge=0)
    spare_ranks: bool = new_key(
        True,
        "With `max_restarts`: a process waits beside each rank, with everything imported, and becomes the rank after a "
        "failure; false saves its host memory",
    )
    rendezvous_timeout_s: float = new_key(
        45.0, "At the start, seconds to wait for the next machine or rank after the latest arrival", gt=0
    )
    first_step_timeout_mins: float | None = new_key(
        None,
        "Minutes for ranks to wait for each other until the first step is done, and while they save or validate; "
        "unset: 30, and 3 more for each pipeline rank after the first",
        gt=0,
    )
    collective_timeout_s: float = new_key(
        40.0, "Seconds for ranks to wait for each other in later steps; at least three times the longest step", gt=0
    )
    min_allreduce_gb_s: float | None = new_key(
        None,
        "Train only if an all-reduce of all ranks reaches this bus bandwidth; unset: NEOX_MIN_ALLREDUCE_GB_S of "
        "the environment (set by a site's file), else it is only printed",
        gt=0,
    )


@dataclass(frozen=True)
class ParallelKeys:
    """Configuration keys of how the model is split over ranks."""

    engine: Literal["auto", "native", "deepspeed"] = new_key(
        "auto",
        "Training engine. native: torch alone; deepspeed: DeepSpeed. auto: a resumed run keeps its engine; "
        "others use native if it supports the configuration, else deepspeed",
    )
    pipe_parallel_size: int = key(
        0,
        "Pipeline stages; 0 and 1: no pipeline",
        ge=0,
        differs="GPT-NeoX uses DeepSpeed's pipeline engine for 1, not for 0; here both are the same",
    )
    model_parallel_size: int = key(1, "Tensor-parallel ranks per layer", ge=1)
    pipe_partition_method: str = key(
        "type:transformer|mlp",
        "Balance over pipeline stages: `type:REGEX` layers, `uniform`, `parameters`, or `flops` of a forward pass",
    )
    pipeline_layers: tuple[int, ...] | None = new_key(
        None,
        "Blocks of each pipeline stage, in order, virtual stages too; overrides pipe_partition_method. The first or "
        "the last may be 0, for a stage of the embedding or the output layer alone (engine native)",
    )
    pipeline_schedule: Literal["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"] = new_key(
        "1f1b",
        "Order of forward and backward passes over pipeline stages; `--print-schedule` shows it. All but 1f1b need "
        "the native engine. With interleaved, each rank holds several stages, waits less and sends more. With "
        "zero_bubble, zbv and dualpipev, weight gradients fill the waiting time, in blocks that are not compiled",
    )
    virtual_pipeline_stages: int | None = new_key(
        None, "Stages of each pipeline rank. None: 1 with `1f1b` and `zero_bubble`, else 2", ge=1
    )
    sequence_parallel: bool = key(False, "Also split the sequence between tensor-parallel regions (Megatron)")
    context_parallel_size: int = new_key(
        1,
        "Ranks that share each row of tokens, for rows too long for one GPU: each computes a part (engine native)",
        ge=1,
    )
    context_parallel_type: Literal["auto", "allgather", "ring", "ulysses"] = new_key(
        "auto",
        "How context ranks attend to each other's tokens: by keys and values, gathered (allgather) or handed round "
        "(ring), or by heads (ulysses). auto: ulysses on one machine if heads allow it, else allgather",
    )
    context_parallel_ulysses_size: int = new_key(
        1,
        "With allgather and ring, neighbouring context ranks that exchange heads as in ulysses; the others gather keys "
        "or hand them round. For ranks of several machines",
        ge=1,
    )
    async_tensor_parallel: Literal["auto"] | bool = new_key(
        False,
        "With sequence_parallel, overlap gather and scatter with the linears' products, by torch's symmetric "
        "memory. Needs GPUs of one machine that share memory (NVLink); FP8 linears do without. auto: if "
        "possible, on tested GPU models (none so far)",
    )
    distributed_backend: Literal["auto", "nccl", "gloo", "mpi"] = key(
        "auto",
        "Collectives, and thus the device. auto: nccl on GPUs, gloo on CPUs. gloo: CPUs, even beside GPUs",
        differs="GPT-NeoX's nccl needs GPUs; here nccl means gloo on a machine without them",
        refuse_values={"mpi": "torch is built without it; write auto"},
    )
    zero_optimization: Mapping[str, Any] = key(
        None, "ZeRO: shard state over data-parallel ranks instead of copying it", section=ZeroOptimization
    )


@dataclass(frozen=True)
class BatchKeys:
    """Configuration keys of the three batch sizes. Any two give the third once the data-parallel size is
    known (`NeoXArgs.for_world`)."""

    train_batch_size: int = key(None, "Samples per optimizer step over all ranks", ge=1)
    train_micro_batch_size_per_gpu: int = key(None, "Samples per forward pass of one data-parallel rank", ge=1)
    gradient_accumulation_steps: int = key(
        None,
        "Forward passes per optimizer step; 1 if it cannot be derived",
        ge=1,
        differs="GPT-NeoX never derives it: there train_batch_size needs it",
    )
