"""Copies a GPU's tensors to page-locked host memory, for checkpoints.

A GPU writes to page-locked memory at the full speed of the bus. Later saves use the memory again, because
locking memory takes longer than a copy.
"""

import contextlib
import mmap
import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpointing import readable_size
from megatron.mpu.memory import free_host_memory

# The share of free memory that a copy may take. If it would take more, the run waits for the save instead.
_COPY_AT_MOST = 0.8


@dataclass(frozen=True)
class PageLocking:
    """The functions by which host memory is page-locked for a device.

    lock: takes an address and a number of bytes; raises RuntimeError if it fails.
    unlock: takes the address.
    wait: returns when all copies that have begun are complete.
    """

    lock: Callable[[int, int], None]
    unlock: Callable[[int], None]
    wait: Callable[[], None]


@dataclass(frozen=True)
class RankMemory:
    """The free memory of a rank's machine, and the memory that a copy of the rank's part of a checkpoint
    takes.

    machine: name of the machine.
    size: bytes that the rank saves.
    held: bytes of page-locked memory that the rank already has for the copy.
    free: free bytes of the machine.
    problem: why no more memory could be page-locked; None without a problem.
    """

    machine: str
    size: int
    held: int
    free: int
    problem: str | None


def lacks_memory(ranks: Sequence[RankMemory]) -> str | None:
    """Returns a message about the first machine with too little free memory to copy its ranks' checkpoint
    files.

    None if all machines have enough.
    """
    for machine in sorted({rank.machine for rank in ranks}):
        machine_ranks = [rank for rank in ranks if rank.machine == machine]
        free = min(rank.free for rank in machine_ranks)
        num_bytes = sum(max(0, rank.size - rank.held) for rank in machine_ranks)
        if num_bytes > _COPY_AT_MOST * free:
            return (
                f"{machine} has {readable_size(free)} of free memory, too little for a copy of the checkpoint of "
                f"{readable_size(num_bytes)}"
            )
    return None


class HostCopies:
    """Makes CPU copies of tensors that later steps change. Copies are contiguous, each with its own storage.

    With `locking`, copies of tensors on `device` are in page-locked memory; read them only after `wait`.
    Memory is used for another copy once nothing refers to the previous copy in it, and is kept until the
    process ends. Its size is the most that was in use at once, with each tensor rounded up to whole pages (4
    KiB): with `async_save` this rank's part of a checkpoint, else two files of each kind.

    locking: the device's functions; None: copies are in ordinary memory, and `copy` waits for them.
    held: bytes of page-locked memory.
    problem: why no more memory could be locked; further copies are then in ordinary memory.
    """

    def __init__(self, device: torch.device, locking: PageLocking | None) -> None:
        self._device, self._locking = device, locking
        self._free: dict[int, list[_Pages]] = {}  # by bytes, because layers and saves have tensors of equal sizes
        self.held = 0
        self.problem: str | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a CPU copy of `tensor`. In page-locked memory it may be incomplete until `wait`."""
        tensor = tensor.detach()
        copied = self._locked_like(tensor) if tensor.device.type == self._device.type and tensor.numel() else None
        if copied is None:
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return copied.copy_(tensor, non_blocking=True)

    def memory_for(self, size: int) -> RankMemory:
        """Returns the memory that this machine and this object have for copies of `size` bytes."""
        return RankMemory(platform.node(), size, self.held, free_host_memory(unknown=1 << 62), self.problem)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._locking is not None:
            self._locking.wait()

    def _locked_like(self, tensor: Tensor) -> Tensor | None:
        """Returns page-locked memory for a contiguous copy of a non-empty tensor; None if there is none."""
        if self._locking is None:
            return None
        size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self._free.setdefault(size, [])
        pages = free.pop() if free else self._lock_pages(size, self._locking)
        if pages is None:
            return None
        # Only torch's storage refers to this object, so it ends with the last tensor. Each tensor has a
        # storage of its own size, because torch.save writes whole storages.
        page_view = memoryview(pages.memory)
        weakref.finalize(page_view, free.append, pages).atexit = False
        return torch.frombuffer(page_view, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)

    def _lock_pages(self, size: int, locking: PageLocking) -> "_Pages | None":
        if self.problem is not None:
            return None
        try:
            pages = _Pages(size, locking)
        except (RuntimeError, OSError) as problem:
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            self.problem = (
                f"only {readable_size(self.held)} of memory could be page-locked for checkpoints ({reason}); "
                "the rest is copied through ordinary memory, which takes longer: raise the limit of locked memory "
                "(ulimit -l), or leave more memory free"
            )
            return None
        self.held += size
        return pages


class _Pages:
    """Page-locked memory of `size` bytes, a multiple of the page size. It is unlocked when this object ends.

    torch's allocator of page-locked memory would round sizes up to a power of two. Raises RuntimeError or
    OSError if the memory cannot be locked.
    """

    def __init__(self, size: int, locking: PageLocking) -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Without this, after a fork the next write would copy the page, and the device would write the old
        # one.
        self.memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        page_bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        page_bytes[:: mmap.PAGESIZE].zero_()  # allocates the pages by all threads; locking would allocate one by one
        locking.lock(page_bytes.data_ptr(), size)
        unlocking = weakref.finalize(self, locking.unlock, page_bytes.data_ptr())
        unlocking.atexit = False  # a process that ends unlocks its memory anyway


def host_copies(device: torch.device) -> HostCopies:
    """Returns an object that copies tensors of `device` to the CPU, to page-locked memory if that is a
    GPU."""
    return HostCopies(device, _cuda_page_locking(device) if device.type == "cuda" else None)


def _cuda_page_locking(device: torch.device) -> PageLocking:
    """Returns functions that lock memory by cudaHostRegister
    (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html)."""

    def lock(address: int, size: int) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # cudaHostRegisterPortable
        if code != 0:
            # The runtime keeps this error and raises it at the next kernel launch, so launch one here.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device).add_(1)
            raise torch.cuda.CudaError(code)

    def unlock(address: int) -> None:
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(address)

    return PageLocking(lock, unlock, lambda: torch.cuda.synchronize(device))
