"""What DeepSpeed's pipeline engine is told of weights: tied ones, and stages that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatron.model import Stage


class TiedGradient:
    """Where a tied weight's gradient is: ZeRO with fp16 or offloaded bf16 weights keeps it in `grad_accum`, while the
    pipeline engine sums `grad` over the copies (without this: none, and they drift apart)."""

    def __init__(self, param: nn.Parameter) -> None:
        accumulated = getattr(param, "grad_accum", None)
        self.grad = param.grad if accumulated is None else accumulated
        self._hp_grad = getattr(param, "_hp_grad", None)


def cut_backward(ds: Any, stage: Stage, trained: Sequence[nn.Parameter]) -> None:
    """Let DeepSpeed's pipeline engine run backwards no further than the lowest trained layer: nothing is sent below it.

    trained: of this stage's optimizer. Stages below have a placeholder, or a tied embedding whose gradient comes from
    the last stage: they go through the motions of a backward pass, which gives zeros.
    """
    lowest, first, last = stage.lowest_trained, stage.specs[0].index, stage.specs[-1].index
    if first > lowest or lowest == 0:
        return
    instructions: dict[type, Callable[..., None]] = ds._INSTRUCTION_MAP
    backward = next(run for kind, run in instructions.items() if kind.__name__ == "BackwardPass")

    def send_nothing(engine: Any, buffer_id: int) -> None:
        engine.pipe_buffers["inputs"][buffer_id] = None

    def receive_nothing(engine: Any, buffer_id: int) -> None:
        pass

    def no_gradient(engine: Any, buffer_id: int) -> None:
        out = torch.stack([param.flatten()[0] for param in trained]).sum()
        engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer = out, torch.zeros_like(out)
        backward(engine, buffer_id)

    changed = {"SendGrad": send_nothing}
    if last < lowest:
        changed |= {"RecvGrad": receive_nothing, "BackwardPass": no_gradient}
    ds._INSTRUCTION_MAP = {kind: changed.get(kind.__name__, run) for kind, run in instructions.items()}
