"""The gated short convolution as a mixer of a block (LFM 2: arXiv 2511.23404)."""

import torch
from torch import Tensor

from megatron.model.build_specs import lora_spec
from megatron.model.cache import StateCache, StateShapes
from megatron.model.mamba.inputs import StateInputs
from megatron.model.mamba.mixers import Convolution, StateMixer
from megatron.model.mamba.packages import ScanKernels
from megatron.model.specs import ShortConvSpec
from megatron.mpu import Linear, LinearSpec, ParallelGroups, ParamSpec, adapters_of, with_prefix
from megatron.neox_arguments import ModelArgs


def short_conv_spec(args: ModelArgs, block: int) -> ShortConvSpec | None:
    """Returns the short convolution of block number `block`, counted from 0; None if the block has another
    mixer."""
    if args.attention_config[block] != "short_conv":
        return None
    return ShortConvSpec(args.hidden_size, args.short_conv_kernel, args.use_bias_in_short_conv, lora_spec(args, block))


class ShortConv(StateMixer):
    """C conv(B x) over this rank's channels; input and output are `[seq, batch, hidden]`.

    Parameters are named as Mamba's: `in_proj` (rows of B, C, x), `conv1d`, `out_proj`. Channels are sharded
    over tensor ranks.
    """

    Spec = ShortConvSpec
    spec = staticmethod(short_conv_spec)

    def __init__(
        self, spec: ShortConvSpec, groups: ParallelGroups, sequence_parallel: bool = False, *, backends: ScanKernels
    ) -> None:
        super().__init__()
        conv, (in_spec, out) = self._conv(spec), self._linears(spec)
        self.in_proj = Linear(in_spec, groups, sequence_parallel)
        self.conv1d = Convolution(conv, groups, None, silu=False)  # kernels of `backends` have silu
        self.out_proj = Linear(out, groups, sequence_parallel)

    @staticmethod
    def _conv(spec: ShortConvSpec) -> tuple[ParamSpec, ...]:
        return Convolution.params((spec.hidden,), spec.conv_kernel, spec.bias)

    @staticmethod
    def _linears(spec: ShortConvSpec) -> tuple[LinearSpec, LinearSpec]:
        rows = (spec.hidden,) * 3
        adapters = adapters_of(spec.lora, sum(rows), "in_proj")
        return (
            LinearSpec(spec.hidden, sum(rows), "column", spec.bias, rows, adapters=adapters),
            LinearSpec(spec.hidden, spec.hidden, "row", spec.bias),
        )

    @classmethod
    def params(cls, spec: ShortConvSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates."""
        in_proj, out = (linear.params() for linear in cls._linears(spec))
        return (
            *with_prefix("in_proj", in_proj),
            *with_prefix("conv1d", cls._conv(spec)),
            *with_prefix("out_proj", out),
        )

    @staticmethod
    def state_shapes(spec: ShortConvSpec, size: int, dtype: torch.dtype) -> StateShapes:
        """Returns the shapes of the cache that one tensor rank keeps for each text: the last inputs alone.

        size: number of tensor ranks. dtype: of the weights.
        """
        return StateShapes((spec.conv_kernel - 1, spec.hidden // size), (0,), dtype)

    def core(
        self,
        x: Tensor,
        inputs: StateInputs,
        seed: Tensor | None = None,
        cache: StateCache | None = None,
        adapter_seed: Tensor | None = None,
    ) -> Tensor:
        """Computes the mixer without `out_proj`: `[seq, batch, hidden]` to `[seq, batch, hidden/T]`.

        seed: not used, since the mixer has no dropout.
        cache: the inputs of earlier tokens in generation; None in training.
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        gate, out_gate, x = self.in_proj(x, adapter_seed).chunk(3, dim=-1)
        return out_gate * self.conv1d(gate * x, inputs, cache)
