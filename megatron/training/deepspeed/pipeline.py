"""DeepSpeed's pipeline engine: a stage as its one layer, tied weights, and stages that train nothing."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec as EmptyStage
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils.timer import NoopTimer
from torch import nn

from megatron.data import Batch
from megatron.model import HiddenStates, Stage
from megatron.model.init import parameters_with_specs
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.step_loss import StepLoss


class PipeStage(nn.Module):
    """A stage as the one layer that DeepSpeed's pipeline runs here. Micro-batches are read from `batches` in
    the order of 1F1B's forwards, on every stage alike; only hidden states come through DeepSpeed."""

    def __init__(self, stage: Stage, loss: StepLoss, groups: ParallelGroups) -> None:
        super().__init__()
        self.stage, self.loss, self.groups = stage, loss, groups
        self.batches: Iterator[Batch] = iter(())

    def forward(self, received: Any) -> Any:
        """Hidden states, or on the last stage the loss."""
        batch = next(self.batches)
        hidden = None if self.groups.is_first_stage else HiddenStates(*received)
        out = self.stage(hidden, batch, partial(self.loss.of, batch=batch))
        return tuple(out) if isinstance(out, HiddenStates) else out


class TiedGradient:
    """Where a tied weight's gradient is: ZeRO with fp16 or offloaded bf16 weights keeps it in `grad_accum`,
    while the pipeline engine sums `grad` over the copies (without this: none, and they drift apart)."""

    def __init__(self, param: nn.Parameter) -> None:
        accumulated = getattr(param, "grad_accum", None)
        self.grad = param.grad if accumulated is None else accumulated
        self._hp_grad = getattr(param, "_hp_grad", None)


class TiedPipelineModule(PipelineModule):
    """PipelineModule whose tied weights are our own copies on several stages."""

    tied: list[tuple[nn.Parameter, Any]] = []

    def get_tied_weights_and_groups(self) -> list[tuple[TiedGradient, Any]]:
        return [(TiedGradient(param), group) for param, group in self.tied]


def wrap_pipeline(
    stage: Stage,
    loss: StepLoss,
    groups: ParallelGroups,
    args: NeoXArgs,
    optimized: Sequence[nn.Parameter],
) -> tuple[PipeStage, TiedPipelineModule]:
    """The stage as DeepSpeed's pipeline engine runs it. optimized: parameters of the optimizer, placeholders
    too."""
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


def leave_out_timers(ds: Any) -> None:
    """Keep DeepSpeed's pipeline engine from timing its batches: with CUDA events, two a step, which it reads
    and frees only where it prints them."""
    ds.timers = NoopTimer()


def cut_backward(ds: Any, stage: Stage, trained: Sequence[nn.Parameter]) -> None:
    """Let DeepSpeed's pipeline engine run backwards no further than the lowest trained layer: nothing is sent
    below it.

    trained: of this stage's optimizer. Stages below have a placeholder, or a tied embedding whose gradient
    comes from the last stage: they go through the motions of a backward pass, which gives zeros.
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
