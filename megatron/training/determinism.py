"""Runs that give the same bits every time (`deterministic_mode`, as Megatron-LM's)."""

import os
from collections.abc import Callable

import torch

from megatron.neox_arguments import NeoXArgs

# What the libraries may be told, ours first. NCCL's other algorithms sum in an order that timing decides.
_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def make_deterministic(args: NeoXArgs, say: Callable[[str], None]) -> None:
    """With `deterministic_mode`, set torch and its libraries to deterministic algorithms. Call it before they
    use a GPU.

    An operation that cannot be deterministic then raises where it is used. Attention kernels that cannot are
    never chosen by `attention_backend: auto`, and are refused by name.
    Raises ConfigError if an environment variable asks for the opposite.
    """
    if not args.deterministic_mode:
        return
    for name, values in _VARIABLES.items():
        if os.environ.setdefault(name, values[0]) not in values:
            wrong = f"the environment sets {name}={os.environ[name]}"
            raise args.error("deterministic_mode", f"{wrong}; unset it, or use one of {', '.join(values)}")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    variables = ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES)
    say(f"deterministic_mode: torch.use_deterministic_algorithms(True), cuDNN without benchmarking, {variables}")
