"""Sets up the process of a rank.

It reads rank and world size from the environment of torchrun, Slurm, MPI or Kubernetes, and sets environment
variables for torch, gloo and NCCL.
"""

import os
import sys
from typing import TYPE_CHECKING

from megatron.launch.devices import interface_to
from megatron.launch.environment import ProcessInfo, process_info
from megatron.launch.typed_variables import check_world

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

# Variables that configure torch's GPU memory: the name since torch 2.10, and older names that torch still
# reads
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def enter(args: "NeoXArgs") -> ProcessInfo:
    """Returns this process's rank and world size, and sets the environment variables that torch, gloo and
    NCCL read.

    Network interfaces and allocator settings that the user has set are kept. With `distributed_backend: gloo`
    GPUs are hidden from the process, so that all libraries use the CPU.

    Raises LaunchError if the rank cannot be read (see `process_info`), or if MAIN_NODE_IP or TOTAL_GPUS
    contradicts the environment.
    """
    # A default port must not win over the one derived from the job.
    port = None if args.origin("master_port") == "default" else args.master_port
    info = process_info(master_addr=args.master_addr, master_port=port)
    if not args.init_only:  # init_only runs in a single process
        check_world(os.environ, info.world_size, info.on_one_machine)
    os.environ.update(info.variables())
    if args.distributed_backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not any(name in os.environ for name in _ALLOCATOR):
        # Expandable segments reduce fragmentation of GPU memory. torch reads the variable only once.
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    for name, interface in _interfaces(info).items():
        os.environ.setdefault(name, interface)
    return info


def _interfaces(process: ProcessInfo) -> dict[str, str]:
    """Returns the variables that name the network interfaces of gloo and NCCL.

    If all ranks are on this machine, both use loopback. With several machines NCCL chooses by itself, and
    gloo gets the interface that leads to rank 0 (GPU runs use gloo too, for CPU data). By default gloo
    resolves this machine's host name. Laptops and containers often cannot resolve it, and Debian resolves it
    to 127.0.1.1, which other machines cannot reach. Returns {} outside Linux, or if no interface is found.
    """
    if sys.platform != "linux":
        return {}
    if process.on_one_machine:
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    interface = interface_to(process.master_addr)
    return {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
