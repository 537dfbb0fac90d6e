"""What a rank takes from its starter and sets for the libraries it uses, whoever started it."""

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
    """This process's place, with the variables set that torch reads. What the user has set of them is kept.

    With `distributed_backend: gloo` GPUs are hidden from it, so that all of it, libraries included, works on
    CPUs. Raises LaunchError as `process_info`, and where MAIN_NODE_IP or TOTAL_GPUS say otherwise.
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
    """The variables that name the network interfaces at which gloo and NCCL listen.

    Where all ranks are here that is loopback, which no other machine reaches. Else NCCL finds the fabric, and
    gloo, which runs on GPUs too have for what is no tensor of theirs, is given the way to rank 0: left alone
    it asks the resolver for this machine's name, which laptops and containers often cannot answer, and which
    Debian answers with 127.0.1.1: no address that another machine reaches.
    """
    if sys.platform != "linux":
        return {}
    if process.on_one_machine:
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    interface = interface_to(process.master_addr)
    return {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
