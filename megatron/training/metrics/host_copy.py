"""Values on their way from the device to the host."""

import torch


class HostCopy:
    """Copies values from the device to the host in the background; only `read` waits."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Returns the values. Waits for the copy only, not for work that was queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
