"""Finds what a run of this machine has: its GPUs with their free memory, or its CPU."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from megatron.finetuning.choices import GIB, Device
from megatron.launch.devices import choose_ranks, visible_gpus
from megatron.launch.doctor.devices import read_gpus
from megatron.neox_arguments import ConfigError

_BF16 = (8, 0)  # compute capability with fast bfloat16


def free_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that processes may still allocate here: of the machine, and of a container's limit.

    root: the folder that holds /proc and /sys.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, StopIteration):  # not Linux
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # no limit is the word max
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int((root / "sys/fs/cgroup/memory.current").read_text()))
    return max(free, 0)


def this_device(num_gpus: int | None) -> Device:
    """Returns what `deepy.py train.py` will use here. Raises ConfigError for a GPU that does not work."""
    ranks, names = choose_ranks(visible_gpus(os.environ), num_gpus)
    if not names:
        return Device(f"this CPU with {os.cpu_count()} cores", ranks, free_memory() // ranks, False, False)
    # In a process of its own: what it allocates on the GPUs must be gone before the run begins.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        gpus = pool.submit(read_gpus, names).result()
    for gpu in gpus:
        if gpu.problem:
            raise ConfigError([f"GPU {gpu.name}: {gpu.problem}; `deepy.py doctor` tells more"])
    smallest = min(gpu.free for gpu in gpus)
    name = f"{'each ' if len(gpus) > 1 else ''}{gpus[0].model} ({smallest / GIB:.0f} GiB free)"
    return Device(name, ranks, smallest, True, all(gpu.capability >= _BF16 for gpu in gpus))
