"""Explains out-of-memory errors in three lines: the size requested, this rank's memory, the keys to
change."""

import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.mpu.memory import free_host_memory
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.errors import UserError
from megatron.training.offload import offloads_optimizer

# torch's words: "Tried to allocate 2.50 GiB.", on a CPU "you tried to allocate 1048576 bytes."
_REQUEST_PATTERN = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_CPU_ALLOCATOR = "DefaultCPUAllocator"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemoryError(UserError, RuntimeError):
    """Raised when a rank's GPU, or the host memory of a CPU run, has no room for an allocation."""


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a device in bytes, as one process sees it.

    total, free: of the device, whichever processes use it. allocated: in tensors of this process.
    reserved: `allocated` plus unused memory that torch's allocator keeps for this process.
    """

    total: int
    free: int
    allocated: int = 0
    reserved: int = 0


def is_out_of_memory(problem: BaseException) -> bool:
    """Returns whether torch ran out of memory, on a GPU or on the CPU."""
    if isinstance(problem, torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and _CPU_ALLOCATOR in str(problem)


def explained(
    problem: Exception,
    args: NeoXArgs,
    rank: int,
    device: torch.device,
    activity: str,
    parts: Callable[[], Mapping[str, Iterable[Tensor]]] = dict,
) -> Exception:
    """Returns an OutOfMemoryError that explains `problem` in three lines if torch ran out of memory; else
    `problem` itself.

    activity: the rank's current work, such as "in step 12". parts: returns the tensors that the rank holds,
    by the name of their part, such as `weights`.
    """
    if not is_out_of_memory(problem):
        return problem
    cpu = device.type == "cpu" or _CPU_ALLOCATOR in str(problem)
    use = _host_memory() if cpu else _device_memory(device)
    place = "this process" if cpu else str(device)
    summary = (
        f"rank {rank}: out of memory {activity}{_pass_of(problem)}: {_requested_size(problem)}, "
        f"{_size(use.free)} free of {_size(use.total)}"
    )
    held = held_bytes(parts(), torch.device("cpu") if cpu else device)
    return OutOfMemoryError("\n".join([summary, f"{place} holds {holdings(use, held)}", *advice(args, on_gpu=not cpu)]))


def held_bytes(parts: Mapping[str, Iterable[Tensor]], device: torch.device) -> dict[str, int]:
    """Returns how many bytes on `device` the tensors of each part take.

    A storage that two parts share counts for the first only. parts: tensors by the name of the part, such as
    `weights`.
    """
    pointers: set[int] = set()
    sums = dict.fromkeys(parts, 0)
    for part, tensors in parts.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.data_ptr() not in pointers:
                pointers.add(storage.data_ptr())
                sums[part] += storage.nbytes()
    return sums


def holdings(use: MemoryUse, held: Mapping[str, int]) -> str:
    """Returns text with the memory of each owner, such as "weights 3.10 GiB, reserved and unused 0.52 GiB".

    Owners are the parts in `held`, other tensors of this process, its allocator's reserve, and other
    processes.
    """
    unassigned = use.allocated - sum(held.values())
    sizes = {
        **held,
        "activations and other tensors": unassigned if use.allocated else 0,
        "reserved and unused": use.reserved - use.allocated,
        "other processes and libraries": use.total - use.free - use.reserved if use.reserved else 0,
    }
    return ", ".join(f"{name} {_size(size)}" for name, size in sizes.items() if size > 0) or "no tensors of this run"


def advice(args: NeoXArgs, on_gpu: bool = True) -> list[str]:
    """Returns one line that names the keys to change to save memory in this run, cheapest first.

    Returns [] if every such key is at its limit.
    """
    micro, steps = args.train_micro_batch_size_per_gpu or 1, args.gradient_accumulation_steps or 1
    keys: list[tuple[str, str]] = []
    if micro > 1:
        half = -(-micro // 2)
        keys.append(("train_micro_batch_size_per_gpu", f"{micro} -> {half}"))
        keys.append(("gradient_accumulation_steps", f"{steps} -> {steps * micro // half}"))
    keys += _recompute_keys(args)
    if args.tp > 1 and not args.sequence_parallel:
        keys.append(("sequence_parallel", "false -> true"))
    highest = 1 if args.defers_weight_gradients or (args.pp > 1 and args.engine == "deepspeed") else 3
    can_offload = on_gpu and not offloads_optimizer(args) and not args.use_bnb_optimizer
    ranks = args.data_parallel_size * args.context_parallel_size
    shards = ranks > 1 or offloads_optimizer(args) or (can_offload and args.zero_stage == 0)
    if shards and args.zero_stage < highest:
        keys.append(("zero_optimization.stage", f"{args.zero_stage} -> {args.zero_stage + 1}"))
    if can_offload:
        keys.append(("zero_optimization.offload_optimizer.device", "none -> cpu"))
    words = [f"{key}: {change} ({args.origin(key)})" for key, change in keys]
    return [f"to use less memory, change these keys, cheapest first: {'; '.join(words)}"] if words else []


def _recompute_keys(args: NeoXArgs) -> list[tuple[str, str]]:
    """Returns (key, change) pairs that turn on the next stronger recomputation; [] if the strongest is on.

    Example: `[("recompute_granularity", "selective -> full")]`. Selective recomputation costs the least time,
    then recomputing some blocks, then all blocks one at a time.
    """
    if args.activation_memory_budget is not None:
        budget = args.activation_memory_budget
        return [("activation_memory_budget", f"{budget:g} -> {budget / 2:g}")] if budget > 0.05 else []
    if not args.checkpoint_activations:
        return [("checkpoint_activations", "false -> true"), ("recompute_granularity", "full -> selective")]
    if args.recompute_every > 1:
        return [("recompute_every", f"{args.recompute_every} -> {args.recompute_every // 2}")]
    if args.recompute_granularity == "selective":
        return [("recompute_granularity", "selective -> full")]
    if args.checkpoint_num_layers > 1:
        return [("checkpoint_num_layers", f"{args.checkpoint_num_layers} -> 1")]
    return []


def _pass_of(problem: Exception) -> str:
    """Returns the pass in which the exception was raised, such as ", in its backward pass"; "" if unknown. It
    is read from the function names on the traceback."""
    names = [frame.name for frame in traceback.extract_tb(problem.__traceback__)]
    for words, functions in (
        (", in its backward pass", {"backward", "_engine_run_backward"}),
        (", in its update", {"_take_model_step", "optimizer_step"}),
        (", in its forward pass", {"forward"}),
    ):
        if functions & set(names):
            return words
    return ""


def _requested_size(problem: Exception) -> str:
    match = _REQUEST_PATTERN.search(str(problem))
    return f"{_size(int(float(match[1]) * _UNITS[match[2]]))} requested" if match else "an allocation failed"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _device_memory(device: torch.device) -> MemoryUse:
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total, free, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def _host_memory() -> MemoryUse:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryUse(total, free_host_memory(total))
