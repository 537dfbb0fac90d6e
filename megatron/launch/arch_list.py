"""TORCH_CUDA_ARCH_LIST as DeepSpeed's builder of CUDA code can read it.

torch accepts `9.0a` and names such as `Hopper`; DeepSpeed 0.19.8 (ops/op_builder/builder.py, compute_capability_args)
takes int() of what stands between the dots, and ends with "invalid literal for int(): '0a'" when it compiles.
"""

import re
from collections.abc import Callable, MutableMapping

from megatron.launch.driver import capabilities

NAME = "TORCH_CUDA_ARCH_LIST"


def readable(value: str) -> bool:
    """Whether DeepSpeed's builder can read a list such as `8.0;9.0+PTX`; an empty one it makes itself."""
    return all(re.fullmatch(r"\d+\.\d+(\+PTX)?", entry) for entry in re.split(r"[; ]+", value.strip()) if entry)


def set_arch_list(
    env: MutableMapping[str, str], devices: Callable[[], list[tuple[int, int]]] = capabilities
) -> str | None:
    """Put the capabilities of this machine's devices in the place of a list that cannot be read; what was done, in
    words, or None. A list that can be read stays, and without devices nothing is compiled for them."""
    value = env.get(NAME, "")
    if readable(value):
        return None
    ours = ";".join(f"{major}.{minor}" for major, minor in sorted(set(devices())))
    if not ours:
        return None
    env[NAME] = ours
    return f"{NAME}: {value!r} is not a list that DeepSpeed's builder reads; set to {ours}, that of the devices here"
