"""Gated DeltaNet as a mixer of a block: projections, short convolution, and the delta rule over this rank's
heads."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.build_specs import norm_spec
from megatron.model.cache import StateCache, StateShapes
from megatron.model.delta.rule import chunk_delta_rule, unit_length
from megatron.model.mamba.inputs import StateInputs
from megatron.model.mamba.mixers import Convolution, initial_state, recomputed
from megatron.model.mamba.packages import ScanKernels
from megatron.model.specs import GatedDeltaNetSpec
from megatron.mpu import (
    Linear,
    LinearSpec,
    ParallelGroups,
    ParamSpec,
    allocate,
    copy_to_tensor,
    with_prefix,
)
from megatron.neox_arguments import ModelArgs


def gated_delta_net_spec(args: ModelArgs, block: int) -> GatedDeltaNetSpec | None:
    """Returns the Gated DeltaNet of block number `block`, counted from 0; None if the block has another
    mixer."""
    if args.attention_config[block] != "gated_delta_net":
        return None
    return GatedDeltaNetSpec(
        hidden=args.hidden_size, key_heads=args.linear_num_key_heads, heads=args.linear_num_value_heads,
        key_dim=args.linear_key_head_dim, value_dim=args.linear_value_head_dim,
        conv_kernel=args.linear_conv_kernel_dim, norm_eps=norm_spec(args).eps, chunk=args.linear_chunk_size,
        fp32_params=args.mamba_selective_fp32_params,
    )  # fmt: skip


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet over this rank's heads; input and output are `[seq, batch, hidden]`.

    Parameters are named as in HuggingFace's Qwen 3-Next: `in_proj` (rows of queries, keys, values, the gate
    z, rates, decays), `conv1d` over queries, keys and values, `dt_bias` and `A_log` `[heads]`, `norm.weight`
    `[value_dim]`, `out_proj`.

    Each tensor rank has some heads of queries and keys, and the heads of values that share these.
    """

    Spec = GatedDeltaNetSpec
    spec = staticmethod(gated_delta_net_spec)
    module_name = "mixer"
    dt_bias: nn.Parameter
    A_log: nn.Parameter

    def __init__(
        self,
        spec: GatedDeltaNetSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: ScanKernels,
    ) -> None:
        super().__init__()
        size = groups.size("tensor")
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim
        keys, values, heads = spec.keys // size, spec.values // size, spec.heads // size
        self.convolved, self.projected = (keys, keys, values), (2 * keys + values, values, heads, heads)
        own_params, conv, norm = self._own_params(spec)
        allocate(self, own_params, groups)
        in_spec, out = self._linears(spec)
        self.in_proj = Linear(in_spec, groups, sequence_parallel)
        self.conv1d = Convolution(conv, groups, None)  # `backends` are kernels for Mamba
        self.scan = DeltaScan(spec.chunk)
        self.norm = _GatedHeadNorm(norm, spec.norm_eps, groups)
        self.out_proj = Linear(out, groups, sequence_parallel)

    @staticmethod
    def _own_params(
        spec: GatedDeltaNetSpec,
    ) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
        heads = (spec.heads,)
        return (
            (
                ParamSpec("dt_bias", heads, 0, heads, "time_step"),
                ParamSpec("A_log", heads, 0, heads, "log_of_uniform", precise=spec.fp32_params),
            ),
            Convolution.params((spec.keys, spec.keys, spec.values), spec.conv_kernel, bias=False),
            (ParamSpec("weight", (spec.value_dim,), init="ones"),),
        )

    @staticmethod
    def _linears(spec: GatedDeltaNetSpec) -> tuple[LinearSpec, LinearSpec]:
        rows = (spec.keys, spec.keys, spec.values, spec.values, spec.heads, spec.heads)
        return (
            LinearSpec(spec.hidden, sum(rows), "column", False, rows),
            LinearSpec(spec.values, spec.hidden, "row", False),
        )

    @classmethod
    def params(cls, spec: GatedDeltaNetSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates."""
        own_params, conv, norm = cls._own_params(spec)
        in_proj, out = (linear.params() for linear in cls._linears(spec))
        return (
            *own_params,
            *with_prefix("in_proj", in_proj),
            *with_prefix("conv1d", conv),
            *with_prefix("norm", norm),
            *with_prefix("out_proj", out),
        )

    @staticmethod
    def state_shapes(spec: GatedDeltaNetSpec, size: int, dtype: torch.dtype) -> StateShapes:
        """Returns the shapes of the cache that one tensor rank keeps for each text in generation.

        size: number of tensor ranks. dtype: of the weights; states are fp32.
        """
        channels = (2 * spec.keys + spec.values) // size
        state = (spec.heads // size, spec.key_dim, spec.value_dim)
        return StateShapes((spec.conv_kernel - 1, channels), state, torch.float32)

    @property
    def output(self) -> Linear:
        return self.out_proj

    def core(
        self,
        x: Tensor,
        inputs: StateInputs,
        seed: Tensor | None = None,
        cache: StateCache | None = None,
        adapter_seed: Tensor | None = None,
    ) -> Tensor:
        """Computes the mixer without `out_proj`: `[seq, batch, hidden]` to `[seq, batch, heads/T *
        value_dim]`.

        seed: not used, since the mixer has no dropout.
        cache: the state of earlier tokens in generation; None in training.
        adapter_seed: not used, since the mixer has no adapters.
        """
        qkv, z, rate, step = self.in_proj(x).split(self.projected, dim=-1)
        q, k, v = self.conv1d(qkv, inputs, cache).split(self.convolved, dim=-1)
        q, k = (unit_length(part.unflatten(2, (-1, self.key_dim))) for part in (q, k))
        q, v, z = q * self.key_dim**-0.5, v.unflatten(2, (-1, self.value_dim)), z.unflatten(2, (-1, self.value_dim))
        rate = rate.float().sigmoid()
        log_decay = -torch.exp(self.A_log.float()) * F.softplus(step.float() + self.dt_bias.float())
        if inputs.filled is not None:  # padding changes no state
            rate, log_decay = (part.masked_fill(~inputs.filled.unsqueeze(2), 0.0) for part in (rate, log_decay))
        initial = initial_state(cache, inputs, torch.float32)
        y, last = self.scan(q, k, v, log_decay, rate, inputs.documents, initial)
        if cache is not None:
            cache.put_state(last)
        return self.norm(y, z).flatten(2).to(x.dtype)


class DeltaScan(nn.Module):
    """The delta rule over chunks of tokens, whose backward pass computes it again.

    A module, so that compiled blocks can leave it out: compiled code would have a copy of its loop for each
    chunk.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        documents: Tensor | None,
        initial: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (y, last state), as `chunk_delta_rule` does for the same arguments."""
        rule = partial(chunk_delta_rule, chunk=self.chunk, documents=documents, initial=initial)
        return recomputed(rule, q, k, v, log_decay, rate)


class _GatedHeadNorm(nn.Module):
    """Computes RMSNorm of each head of y, times `weight`, which all heads share, times silu(z), in fp32."""

    weight: nn.Parameter

    def __init__(self, params: tuple[ParamSpec, ...], eps: float, groups: ParallelGroups) -> None:
        super().__init__()
        self.group, self.eps = groups.group("tensor"), eps
        allocate(self, params, groups)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Returns the gated norm of y in fp32. y, z: `[seq, batch, heads/T, value_dim]`."""
        weight = copy_to_tensor(self.weight, self.group).float()
        return F.rms_norm(y, self.weight.shape, None, self.eps) * weight * F.silu(z.float())
