"""Finds what a run of this machine has: its GPUs with their free memory, or its CPU."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from megatron.finetuning.choices import GIB, Device
from megatron.launch.devices import choose_ranks, cores, visible_gpus
from megatron.launch.doctor.devices import read_gpus
from megatron.mpu.memory import free_host_memory
from megatron.neox_arguments import ConfigError

_BF16 = (8, 0)  # compute capability with fast bfloat16


def this_device(num_gpus: int | None) -> Device:
    """Returns what `deepy.py train.py` will use here. Raises ConfigError for a GPU that does not work."""
    ranks, names = choose_ranks(visible_gpus(os.environ), num_gpus)
    if not names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(f"this CPU with {cores()} cores", ranks, free_host_memory(total) // ranks, False, False)
    # In a process of its own: what it allocates on the GPUs must be gone before the run begins.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        gpus = pool.submit(read_gpus, names).result()
    for gpu in gpus:
        if gpu.problem:
            raise ConfigError([f"GPU {gpu.name}: {gpu.problem}; `deepy.py doctor` tells more"])
    smallest = min(gpu.free for gpu in gpus)
    name = f"{'each ' if len(gpus) > 1 else ''}{gpus[0].model} ({smallest / GIB:.0f} GiB free)"
    return Device(name, ranks, smallest, True, all(gpu.capability >= _BF16 for gpu in gpus))
