"""Adapts a model's stages to DeepSpeed's pipeline engine.

Each stage becomes one of its layers. Tied weights, and stages that train nothing, need special care.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec as EmptyStage
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron.data import Batch
from megatron.model import HiddenStates, Stage
from megatron.model.init import parameters_with_specs
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ModelArgs
from megatron.training.engine import StepLoss


class PipeStage(nn.Module):
    """Wraps a stage as the one layer that DeepSpeed's pipeline runs on this rank.

    Every stage takes the micro-batches from `batches`, in the order of 1F1B's forward passes. DeepSpeed
    passes only hidden states between stages.
    """

    def __init__(self, stage: Stage, loss: StepLoss, groups: ParallelGroups) -> None:
        super().__init__()
        self.stage, self.loss, self.groups = stage, loss, groups
        self.batches: Iterator[Batch] = iter(())

    def forward(self, received: Any) -> Any:
        """Returns the stage's hidden states, or on the last stage the scaled loss, of the next
        micro-batch."""
        batch = next(self.batches)
        hidden = None if self.groups.is_first_stage else HiddenStates(*received)
        out = self.stage(hidden, batch, partial(self.loss.scaled_loss, batch=batch))
        return tuple(out) if isinstance(out, HiddenStates) else out


class TiedGradient:
    """Shows DeepSpeed's pipeline engine the gradient of a tied weight as `grad`, which it sums over stages.

    ZeRO with fp16 or offloaded bf16 weights keeps that gradient in `grad_accum`, where the engine does not
    look. Then nothing would be summed, and the copies of the weight would drift apart.
    """

    def __init__(self, param: nn.Parameter) -> None:
        accumulated = getattr(param, "grad_accum", None)
        self.grad = param.grad if accumulated is None else accumulated
        self._hp_grad = getattr(param, "_hp_grad", None)


class TiedPipelineModule(PipelineModule):
    """A PipelineModule whose tied weights are listed in `tied`, with the group of ranks that hold copies of
    each."""

    tied: list[tuple[nn.Parameter, Any]] = []

    def get_tied_weights_and_groups(self) -> list[tuple[TiedGradient, Any]]:
        return [(TiedGradient(param), group) for param, group in self.tied]


def wrap_pipeline(
    stage: Stage, loss: StepLoss, groups: ParallelGroups, args: ModelArgs, optimized: Sequence[nn.Parameter]
) -> tuple[PipeStage, TiedPipelineModule]:
    """Returns a stage as a layer, and the PipelineModule around it that DeepSpeed's pipeline engine runs.

    optimized: the optimizer's parameters, placeholders included.
    """
    stage_ids = {id(param) for param in stage.parameters()}
    pipe = PipeStage(stage, loss, groups)
    pipe.placeholders = nn.ParameterList([param for param in optimized if id(param) not in stage_ids])
    topology = PipeModelDataParallelTopology(
        num_pp=groups.size("pipe"), num_mp=groups.size("tensor"), num_dp=groups.size("data")
    )
    layers: list[Any] = [EmptyStage(nn.Identity) for _ in range(groups.size("pipe"))]
    layers[groups.rank("pipe")] = pipe
    module = TiedPipelineModule(layers, topology=topology, partition_method="uniform")
    ordered = sorted(parameters_with_specs(stage, args), key=lambda item: not item[3].tied)  # one order on all stages
    copies = [(param, spec.stages(groups)) for _, _, param, spec in ordered]
    module.tied = [(param, group) for param, group in copies if group is not None and param.requires_grad]
    return pipe, module


def truncate_backward(ds: Any, stage: Stage, trained: Sequence[nn.Parameter]) -> None:
    """Make DeepSpeed's pipeline engine end its backward pass at the lowest trained layer.

    No gradient is sent to stages below. Those train only a placeholder, or a tied embedding whose gradient
    comes from the last stage. They run a dummy backward pass, which gives zeros. trained: parameters of this
    stage's optimizer.
    """
    lowest, first_index, last = stage.lowest_trained, stage.specs[0].index, stage.specs[-1].index
    if first_index > lowest or lowest == 0:
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
