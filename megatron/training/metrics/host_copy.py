"""Copies tensors from the device to the host in the background."""

import torch


class HostCopy:
    """A copy of a tensor from the device to the host, which runs in the background; only `read` waits for
    it."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Returns the copied values. Waits for the copy, but not for work queued on the device after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
