"""The experts of a mixture of experts: plain or gated feed-forwards, whose weights are stacked along the
rows."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.model.mlp import ACTIVATIONS, gated_activation
from megatron.model.specs import MoESpec
from megatron.mpu import ParallelGroups, ParamSpec, allocate, copy_to_tensor
from megatron.mpu.deferred import DeferredGradients
from megatron.mpu.grouped import GroupedProduct, PlainGroupedProduct, grouped_linear


class Experts(nn.Module):
    """Computes w2(act(w1 x)), or w2(act(w1 x) * w3 x) for gated experts. Names are GPT-NeoX's.

    w1, w3 and w2 are `[experts * width, hidden]`, expert after expert; an expert's w2 is stored as `[width,
    hidden]`. Tensor ranks hold either some experts in full, or a slice of every expert's width. Ranks of
    expert parallelism hold some experts in full.

    product: computes the matrix products. deferred: may leave weight gradients for later, in zero-bubble
    pipelines; None: nothing does.
    """

    deferred: DeferredGradients | None = None

    w1: nn.Parameter
    w2: nn.Parameter
    w3: nn.Parameter | None
    w1_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None
    w3_bias: nn.Parameter | None

    def __init__(self, spec: MoESpec, groups: ParallelGroups) -> None:
        super().__init__()
        self.gated, self.hidden = spec.expert.gated, spec.expert.hidden
        self.number = spec.router.experts // groups.size("expert") // (1 if spec.sharded else groups.size("tensor"))
        self.activate: Callable[..., Tensor] = (gated_activation if self.gated else ACTIVATIONS.__getitem__)(
            spec.expert.activation
        )
        # The tensor ranks' slices of an expert's output are summed, so only one rank adds the bias.
        self.group = groups.group("tensor") if spec.sharded else None
        self.adds_bias = self.group is None or groups.rank("tensor") == 0
        self.product: GroupedProduct = PlainGroupedProduct()
        allocate(self, self.params(spec), groups, "w3", "w1_bias", "w2_bias", "w3_bias")

    @staticmethod
    def params(spec: MoESpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates."""
        expert, n = spec.expert, spec.router.experts
        rows = n * expert.width
        blocks = (expert.width,) * n if spec.sharded else (rows,)

        def matrix(name: str, init: str) -> ParamSpec:
            return ParamSpec(
                name, (rows, expert.hidden), 0, blocks, init, weight_decay=True, projections=(expert.width,) * n,
                experts=n, transposed=name == "w2",
            )  # fmt: skip

        def bias(name: str) -> ParamSpec:
            if name != "w2_bias":
                return ParamSpec(name, (rows,), 0, blocks, experts=n)
            shape = (n, expert.hidden)
            return ParamSpec(name, shape, experts=n) if spec.sharded else ParamSpec(name, shape, 0, (n,), experts=n)

        names = ("w1", "w3", "w2") if expert.gated else ("w1", "w2")
        weights = tuple(matrix(name, "output" if name == "w2" else "input") for name in names)
        return (*weights, *(bias(f"{name}_bias") for name in names)) if expert.bias else weights

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Returns the outputs of rows `[rows, hidden]` that are sorted by expert.

        If tensor ranks hold slices of experts, the result is this rank's summand of the outputs.

        ends: `[experts of this rank]` int32, the index after each expert's last row.
        """
        inner = self._up(x, self.w1, self.w1_bias, ends)
        if self.w3 is None:
            inner = self.activate(inner)
        else:
            inner = self.activate(inner, self._up(x, self.w3, self.w3_bias, ends))
        out = self._product(inner, self.w2, ends, self._matrices)
        if self.w2_bias is None:
            return out
        bias = copy_to_tensor(self.w2_bias, self.group)
        return out + bias[self._expert_of(x, ends)] if self.adds_bias else out + 0.0 * bias.sum()

    def _up(self, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        out = self._product(x, weight, ends, lambda rows: self._matrices(rows).transpose(1, 2))
        return out if bias is None else out + bias.view(self.number, -1)[self._expert_of(x, ends)]

    def _product(self, x: Tensor, weight: Tensor, ends: Tensor, matrices: Callable[[Tensor], Tensor]) -> Tensor:
        return grouped_linear(x, weight, ends, matrices, self.product, self.deferred)

    def _matrices(self, weight: Tensor) -> Tensor:
        """Returns a stacked weight as one matrix per expert, `[experts of this rank, width, hidden]`."""
        return weight.view(self.number, -1, self.hidden)

    def _expert_of(self, x: Tensor, ends: Tensor) -> Tensor:
        """Returns the index of each row's expert, `[rows]`; rows past the last end get the last expert."""
        places = torch.arange(len(x), dtype=ends.dtype, device=ends.device)
        return torch.searchsorted(ends, places, right=True).clamp(max=self.number - 1)
