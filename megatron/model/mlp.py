"""The dense feed-forward of a block, plain or gated, and the activation functions."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.build_specs import dense_spec
from megatron.model.specs import DenseSpec
from megatron.mpu import (
    Linear,
    LinearSpec,
    ParallelGroups,
    ParamSpec,
    adapters_of,
    allocate,
    copy_to_tensor,
    with_prefix,
)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "softsign": F.softsign,
    "silu": F.silu,
    "mish": F.mish,
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
}


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate), after clamping gate to <= `limit` and up to [-limit,
    limit].

    It is gpt-oss's activation (`GptOssExperts._apply_gate` of transformers, `swigluoai` of vLLM). gate, up
    and the result have the same shape and dtype.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def gated_activation(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function of (gate, up) of a gated feed-forward: act(gate) * up, or gpt-oss's
    `clamped_swiglu`.

    name: a name in `ACTIVATIONS`, or swigluoai.
    """
    if name == "swigluoai":
        return clamped_swiglu
    activate = ACTIVATIONS[name]
    return lambda gate, up: activate(gate) * up


XIELU_BETA, XIELU_EPS = 0.5, -1e-6


class XIELU(nn.Module):
    """The activation xIELU with trained parameters, in fp32 (arXiv 2411.13010).

    x > 0: a x^2 + b x; otherwise n (expm1(min(x, eps)) - x) + b x. Here a = softplus(alpha_p), n = b +
    softplus(alpha_n), b = 0.5 and eps = -1e-6.
    alpha_p and alpha_n `[1]` are trained. They are equal on all tensor ranks, so their gradients are summed.
    """

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        self.group = groups.group("tensor")
        allocate(self, self.params(), groups)

    @staticmethod
    def params() -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters. Their initial values give a = n = 0.8, as in the paper."""
        return tuple(
            ParamSpec(name, (1,), init=math.log(math.expm1(at_first)))
            for name, at_first in (("alpha_p", 0.8), ("alpha_n", 0.8 - XIELU_BETA))
        )

    def forward(self, x: Tensor) -> Tensor:
        positive, negative = (
            F.softplus(copy_to_tensor(alpha, self.group).float()) for alpha in (self.alpha_p, self.alpha_n)
        )
        wide = x.float()
        negative_branch = (torch.expm1(wide.clamp(max=XIELU_EPS)) - wide) * (XIELU_BETA + negative)
        return (torch.where(wide > 0, positive * wide * wide, negative_branch) + XIELU_BETA * wide).to(x.dtype)


class MLP(nn.Module):
    """The dense feed-forward: linear2(act(linear1 x)), or gated: linear2(act(gate) * up). Input and output:
    `[seq, batch, hidden]`.

    In a gated feed-forward the rows of linear1 are [up; gate].
    """

    Spec = DenseSpec
    spec = staticmethod(dense_spec)

    def __init__(self, spec: DenseSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.gated = spec.gated
        self.act_fn: Callable[..., Tensor]
        if spec.gated:
            self.act_fn = gated_activation(spec.activation)
        else:
            self.act_fn = XIELU(groups) if spec.activation == "xielu" else ACTIVATIONS[spec.activation]
        linear1, linear2 = self._linears(spec)
        self.linear1 = Linear(linear1, groups, sequence_parallel)
        self.linear2 = Linear(linear2, groups, sequence_parallel)

    @staticmethod
    def _linears(spec: DenseSpec) -> tuple[LinearSpec, LinearSpec]:
        rows = (spec.width, spec.width) if spec.gated else (spec.width,)
        names, fused_name = (("up_proj", "gate_proj"), "gate_up_proj") if spec.gated else ((), "up_proj")
        up = adapters_of(spec.lora, sum(rows), fused_name, names, rows, pattern_sharded=True)
        down = adapters_of(spec.lora, spec.hidden, "down_proj")
        return (
            LinearSpec(spec.hidden, sum(rows), "column", spec.bias, rows, adapters=up),
            LinearSpec(
                spec.width, spec.hidden, "row", spec.bias, bias_sum_over_tensor=spec.parallel_residual, adapters=down
            ),
        )

    @classmethod
    def params(cls, spec: DenseSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates, in NeoX's registration
        order."""
        linear1, linear2 = cls._linears(spec)
        trained = with_prefix("act_fn", XIELU.params()) if spec.activation == "xielu" else ()
        return (*with_prefix("linear1", linear1.params()), *with_prefix("linear2", linear2.params()), *trained)

    @property
    def output(self) -> Linear:
        return self.linear2

    def core(
        self, x: Tensor, adapter_seed: Tensor | None = None, token_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Computes the feed-forward without `linear2`: `[seq, batch, hidden]` to `[seq, batch, ffn/T]`.

        Returns (the result, None); the None stands for the sums of a router. token_mask is not used.
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        x = self.linear1(x, adapter_seed)
        if self.gated:
            up, gate = x.chunk(2, dim=-1)
            return self.act_fn(gate, up), None
        return self.act_fn(x), None
