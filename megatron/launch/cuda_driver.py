"""What NVIDIA's driver says of the devices that this process may use: without torch, whose import takes
seconds, and without taking memory on a device. With it TORCH_CUDA_ARCH_LIST becomes one that DeepSpeed can
read.

torch accepts `9.0a` and names such as `Hopper` there; DeepSpeed 0.19.8 (ops/op_builder/builder.py,
compute_capability_args) takes int() of what stands between the dots, and ends with "invalid literal for
int(): '0a'" when it compiles.
"""

import ctypes
import re
from collections.abc import Callable, MutableMapping

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE of cuda.h
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA version that the driver of this machine serves; None without a driver."""
    driver, number = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def device_count() -> int | None:
    """Number of devices; None where there is no driver, or one that does not answer."""
    driver = _driver()
    if driver is None:
        return None
    state = driver.cuInit(0)
    count = ctypes.c_int()
    if state == _NO_DEVICE:
        return 0
    return None if state or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def capabilities() -> list[tuple[int, int]]:
    """Compute capability of each device, as (major, minor)."""
    driver, device, versions = _driver(), ctypes.c_int(), []
    for index in range(device_count() or 0):
        assert driver is not None
        numbers = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        versions.append((numbers[0].value, numbers[1].value))
    return versions


def is_readable_arch_list(value: str) -> bool:
    """Whether DeepSpeed's builder can read a list such as `8.0;9.0+PTX`; an empty one it makes itself."""
    return all(re.fullmatch(r"\d+\.\d+(\+PTX)?", entry) for entry in re.split(r"[; ]+", value.strip()) if entry)


def set_arch_list(
    env: MutableMapping[str, str], devices: Callable[[], list[tuple[int, int]]] = capabilities
) -> str | None:
    """Put the capabilities of this machine's devices in the place of a list that cannot be read; what was
    done, in words, or None. A list that can be read stays, and without devices nothing is compiled for them.
    """
    value = env.get(ARCH_LIST, "")
    if is_readable_arch_list(value):
        return None
    local_list = ";".join(f"{major}.{minor}" for major, minor in sorted(set(devices())))
    if not local_list:
        return None
    env[ARCH_LIST] = local_list
    return (
        f"{ARCH_LIST}: {value!r} is not a list that DeepSpeed's builder reads; set to {local_list}, that of the "
        "devices here"
    )


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
