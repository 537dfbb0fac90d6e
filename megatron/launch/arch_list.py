"""TORCH_CUDA_ARCH_LIST as DeepSpeed's builder of CUDA code can read it.

torch accepts `9.0a` and names such as `Hopper`; DeepSpeed 0.19.8 (ops/op_builder/builder.py, compute_capability_args)
takes int() of what stands between the dots, and ends with "invalid literal for int(): '0a'" when it compiles.
"""

import ctypes
import re
from collections.abc import Callable, MutableMapping

NAME = "TORCH_CUDA_ARCH_LIST"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h


def readable(value: str) -> bool:
    """Whether DeepSpeed's builder can read a list such as `8.0;9.0+PTX`; an empty one it makes itself."""
    return all(re.fullmatch(r"\d+\.\d+(\+PTX)?", entry) for entry in re.split(r"[; ]+", value.strip()) if entry)


def capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the devices that this process may use, asked of the driver: without torch, and without
    taking memory on the device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, found = ctypes.c_int(), ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for index in range(count.value):
        numbers = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        found.append((numbers[0].value, numbers[1].value))
    return found


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
