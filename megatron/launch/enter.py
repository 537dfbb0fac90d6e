"""Sets up a rank: reads its rank and world from any starter's environment, and sets variables for
libraries."""

import os
import sys
from typing import TYPE_CHECKING

from megatron.launch.devices import interface_to
from megatron.launch.environment import ProcessInfo, process_info
from megatron.launch.typed_variables import check_world

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

# torch's memory of GPUs: the name since 2.10, and older ones that it still reads.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def enter(args: "NeoXArgs") -> ProcessInfo:
    """Returns this process's rank and world, and sets the environment variables that torch, gloo and NCCL
    read.

    Network interfaces and allocator settings of the user are kept. With `distributed_backend: gloo` GPUs are
    hidden from the process, so that all libraries use the CPU.

    Raises LaunchError as `process_info`, and if MAIN_NODE_IP or TOTAL_GPUS contradict the environment.
    """
    # A default port must not win over the one derived from the job.
    port = None if args.origin("master_port") == "default" else args.master_port
    info = process_info(master_addr=args.master_addr, master_port=port)
    if not args.init_only:  # which one process does for all
        check_world(os.environ, info.world_size, info.on_one_machine)
    os.environ.update(info.variables())
    if args.distributed_backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not any(name in os.environ for name in _ALLOCATOR):
        # Blocks of any sizes share memory, of which less lies unused between them. Torch reads it once.
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    for name, interface in _interfaces(info).items():
        os.environ.setdefault(name, interface)
    return info


def _interfaces(process: ProcessInfo) -> dict[str, str]:
    """Returns the variables that name the network interfaces of gloo and NCCL.

    With all ranks on this machine both use loopback. With several machines NCCL chooses by itself, and gloo
    gets the interface through which rank 0 is reached (GPU runs use gloo too, for CPU data). By default gloo
    would resolve this machine's name, which laptops and containers often cannot, and which Debian resolves to
    127.0.1.1, an address that other machines do not reach.
    """
    if sys.platform != "linux":
        return {}
    if process.on_one_machine:
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    interface = interface_to(process.master_addr)
    return {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
