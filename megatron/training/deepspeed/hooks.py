"""Installs hooks in DeepSpeed's step, which run between the backward pass and the update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.training.nonfinite_guard import SpikeGuard


def judge_steps(ds: Any, verdict: Tensor, judge: Callable[[], None]) -> None:
    """Make DeepSpeed's engine call `judge` before each update, and add `verdict` (0 or NaN) to its gradient
    norm.

    If the verdict is NaN, DeepSpeed's own check of the norm skips the step, without another wait for the
    device.
    """
    optimizer, take_step = ds.optimizer, ds._take_model_step

    def judged_step(*args: Any, **kwargs: Any) -> None:
        judge()
        take_step(*args, **kwargs)

    def on_its_device(norm: Tensor) -> Tensor:
        return norm + verdict.to(norm.device)  # the norm of offloaded gradients is on the CPU

    ds._take_model_step = judged_step
    if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
        norm = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda *args, **kwargs: on_its_device(norm(*args, **kwargs))
    elif hasattr(optimizer, "_get_norm_groups"):  # stage 3
        norms = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [on_its_device(norm) for norm in norms()]
    else:  # stage 1 in bf16
        grads = optimizer.get_grads_for_norm

        def with_verdict(for_clipping: bool = False) -> Any:
            for_norm = grads(for_clipping=for_clipping)
            return for_norm if for_clipping else ([*for_norm[0], verdict.view(1)], for_norm[1])

        optimizer.get_grads_for_norm = with_verdict


def guard_steps(ds: Any, optimizer: torch.optim.Optimizer, guard: SpikeGuard, loss: Callable[[], float]) -> None:
    """Make DeepSpeed's engine skip the update of each step whose loss `guard` rejects.

    loss: returns the step's loss. DeepSpeed runs its step as usual; only `optimizer.step` does nothing.
    """
    update, take_step = optimizer.step, ds._take_model_step

    def guarded_update(closure: Any = None) -> Any:
        return None if guard.skips else update(closure)

    def guarded_step(*args: Any, **kwargs: Any) -> None:
        guard.decide(loss())
        take_step(*args, **kwargs)

    optimizer.step = guarded_update  # type: ignore[method-assign]
    ds._take_model_step = guarded_step
