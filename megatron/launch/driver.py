"""What NVIDIA's driver says of the devices that this process may use: without torch, whose import takes seconds, and
without taking memory on a device."""

import ctypes

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE of cuda.h
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


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
    """Compute capability of each device."""
    driver, device, found = _driver(), ctypes.c_int(), []
    for index in range(device_count() or 0):
        assert driver is not None
        numbers = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        found.append((numbers[0].value, numbers[1].value))
    return found


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
