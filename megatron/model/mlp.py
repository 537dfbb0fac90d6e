"""The dense feed-forward of a block, plain or gated, and the activation functions."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.specs import DenseSpec, dense_spec
from megatron.mpu import Linear, LinearSpec, ParallelGroups, ParamSpec, adapters_of, with_prefix

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "softsign": F.softsign,
    "silu": F.silu,
    "mish": F.mish,
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
}


class MLP(nn.Module):
    """linear2(act(linear1 x)), or linear2(act(gate) * up) with linear1's rows [up; gate];
    `[seq, batch, hidden]`."""

    Spec = DenseSpec
    spec = staticmethod(dense_spec)

    def __init__(self, spec: DenseSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.gated = spec.gated
        self.activation = ACTIVATIONS[spec.activation]
        linear1, linear2 = self._linears(spec)
        self.linear1 = Linear(linear1, groups, sequence_parallel)
        self.linear2 = Linear(linear2, groups, sequence_parallel)

    @staticmethod
    def _linears(spec: DenseSpec) -> tuple[LinearSpec, LinearSpec]:
        rows = (spec.width, spec.width) if spec.gated else (spec.width,)
        names, whole = (("up_proj", "gate_proj"), None) if spec.gated else ((), "up_proj")
        up = adapters_of(spec.lora, sum(rows), whole, names, rows, cut=True)
        down = adapters_of(spec.lora, spec.hidden, "down_proj")
        return (
            LinearSpec(spec.hidden, sum(rows), "column", spec.bias, rows, adapters=up),
            LinearSpec(
                spec.width, spec.hidden, "row", spec.bias, bias_sum_over_tensor=spec.parallel_residual, adapters=down
            ),
        )

    @classmethod
    def params(cls, spec: DenseSpec) -> tuple[ParamSpec, ...]:
        """The parameters that the constructor allocates, in NeoX's registration order."""
        linear1, linear2 = cls._linears(spec)
        return (*with_prefix("linear1", linear1.params()), *with_prefix("linear2", linear2.params()))

    @property
    def output(self) -> Linear:
        return self.linear2

    def core(self, x: Tensor, adapter_seed: Tensor | None = None) -> Tensor:
        """Everything before `linear2`: from `[seq, batch, hidden]` to `[seq, batch, ffn/T]`. adapter_seed: as
        of `Linear.forward`."""
        x = self.linear1(x, adapter_seed)
        if self.gated:
            up, gate = x.chunk(2, dim=-1)
            return self.activation(gate) * up
        return self.activation(x)
