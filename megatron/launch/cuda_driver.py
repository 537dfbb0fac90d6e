"""Asks NVIDIA's driver about the devices that this process may use.

This module needs neither torch, whose import takes seconds, nor memory on a device.

`set_arch_list` replaces a TORCH_CUDA_ARCH_LIST that DeepSpeed cannot read. torch accepts `9.0a` and names
such as `Hopper` there. DeepSpeed 0.19.8 (ops/op_builder/builder.py, compute_capability_args) calls int() on
both sides of the point, and fails with "invalid literal for int(): '0a'" when it compiles.
"""

import ctypes
import re
from collections.abc import Callable, MutableMapping

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE of cuda.h
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def driver_cuda() -> tuple[int, int] | None:
    """Returns the newest CUDA version that this machine's driver supports, as (major, minor); None without a
    driver."""
    driver, number = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def device_count() -> int | None:
    """Returns the number of GPUs; None if there is no driver or it does not answer."""
    driver = _driver()
    if driver is None:
        return None
    state = driver.cuInit(0)
    count = ctypes.c_int()
    if state == _NO_DEVICE:
        return 0
    return None if state or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def capabilities() -> list[tuple[int, int]]:
    """Returns the compute capability of each GPU, as (major, minor)."""
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
    """Returns whether DeepSpeed's builder can read a value of TORCH_CUDA_ARCH_LIST, such as `8.0;9.0+PTX`. An
    empty value is readable."""
    return all(re.fullmatch(r"\d+\.\d+(\+PTX)?", entry) for entry in re.split(r"[; ]+", value.strip()) if entry)


def set_arch_list(
    env: MutableMapping[str, str], devices: Callable[[], list[tuple[int, int]]] = capabilities
) -> str | None:
    """If DeepSpeed cannot read TORCH_CUDA_ARCH_LIST in `env`, sets it to the compute capabilities of this
    machine's GPUs.

    devices: returns the compute capability of each GPU.

    Returns a message about the change; None if nothing was changed, because the list is readable or there are
    no GPUs.
    """
    value = env.get(ARCH_LIST, "")
    if is_readable_arch_list(value):
        return None
    local_list = ";".join(f"{major}.{minor}" for major, minor in sorted(set(devices())))
    if not local_list:
        return None
    env[ARCH_LIST] = local_list
    return (
        f"{ARCH_LIST}: DeepSpeed's builder cannot read {value!r}; it is replaced by {local_list}, the compute "
        "capabilities of this machine's GPUs"
    )


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
