"""The feed-forward layer, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu import Linear, ParallelGroups
from megatron.neox_arguments import NeoXArgs


def activation_function(args: NeoXArgs) -> Callable[[Tensor], Tensor]:
    """The nonlinearity of `activation`; for gated ones, that of the gate.

    gelu is exact (erf), or the tanh approximation under `bias_gelu_fusion` as in NeoX. Transformer-Engine's gelu and
    geglu are the tanh approximation: `x * (0.5F + 0.5F * tanhf(x * (0.79788456F + 0.03567741F * x * x)))` in
    common/util/math.h, and its tests compare LayerNormMLP with `nn.GELU(approximate="tanh")`.
    """
    tanh = partial(F.gelu, approximate="tanh")
    gelu = tanh if args.bias_gelu_fusion or args.te_layernorm_mlp else F.gelu
    table: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": gelu,
        "geglu": tanh if args.te_layernorm_mlp else F.gelu,
        "geglu_tanh": tanh,
        "relu": F.relu,
        "reglu": F.relu,
        "softsign": F.softsign,
        "swish": F.silu,
        "silu": F.silu,
        "swiglu": F.silu,
        "mish": F.mish,
        "bilinear": lambda x: x,
        "glu": torch.sigmoid,
    }
    return table[args.activation]


class MLP(nn.Module):
    """linear2(act(linear1 x)), or linear2(act(gate) * up) with linear1's rows [up; gate]; `[seq, batch, hidden]`."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__()
        self.gated = args.is_gated
        self.activation = activation_function(args)
        width = args.ffn_size * (2 if self.gated else 1)
        self.linear1 = Linear(
            args.hidden_size, width, parallel="column", bias=args.use_bias_in_mlp, groups=groups,
            sequence_parallel=args.sequence_parallel,
        )  # fmt: skip
        self.linear2 = Linear(
            args.ffn_size, args.hidden_size, parallel="row", bias=args.use_bias_in_mlp, groups=groups,
            sequence_parallel=args.sequence_parallel,
        )  # fmt: skip

    def core(self, x: Tensor) -> Tensor:
        """Everything before `linear2`: `[seq, batch, local ffn]`."""
        x = self.linear1(x)
        if self.gated:
            up, gate = x.chunk(2, dim=-1)
            return self.activation(gate) * up
        return self.activation(x)
