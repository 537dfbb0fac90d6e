"""Mamba and Mamba 2 as mixers of a block: projections, short convolution, and the scan over this rank's
channels or heads."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.model.build_specs import lora_spec, norm_spec
from megatron.model.cache import StateCache, StateShapes
from megatron.model.mamba.chunk_scan import chunk_scan
from megatron.model.mamba.context import from_earlier_chunks, with_tails, without_tails
from megatron.model.mamba.convolution import causal_convolution, last_inputs
from megatron.model.mamba.inputs import StateInputs
from megatron.model.mamba.packages import ScanKernels
from megatron.model.mamba.selective_scan import selective_scan
from megatron.model.specs import Mamba2Spec, MambaSpec
from megatron.mpu import (
    Linear,
    LinearSpec,
    ParallelGroups,
    ParamSpec,
    adapters_of,
    allocate,
    copy_to_tensor,
    gather_from_sharers,
    share_out,
    with_prefix,
)
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.model_args import MAMBA_2_BLOCKS

Computed = TypeVar("Computed")  # by a function that the backward pass runs again


def mamba_spec(args: ModelArgs, block: int) -> MambaSpec | None:
    """Returns the Mamba mixer of block number `block`, counted from 0; None if the block has another
    mixer."""
    if args.attention_config[block] != "mamba":
        return None
    return MambaSpec(
        hidden=args.hidden_size, inner=args.mamba_inner_size, state=args.mamba_state_dim or 16,
        dt_rank=args.mamba_dt_rank or -(-args.hidden_size // 16), conv_kernel=args.mamba_conv_kernel,
        conv_bias=args.mamba_use_bias_in_conv, bias=args.mamba_use_bias_in_linears,
        norm_eps=args.mamba_bcdt_norm_epsilon, fp32_params=args.mamba_selective_fp32_params,
        state_fp32=args.mamba_state_fp32, lora=lora_spec(args, block),
    )  # fmt: skip


def mamba2_spec(args: ModelArgs, block: int) -> Mamba2Spec | None:
    """Returns the Mamba 2 mixer of block number `block`, counted from 0; None if the block has another
    mixer."""
    if args.attention_config[block] not in MAMBA_2_BLOCKS:
        return None
    low, high = (*(args.mamba_time_step_limit or (0.0,)), math.inf)[:2]
    return Mamba2Spec(
        hidden=args.hidden_size, heads=args.mamba2_heads, head_dim=args.mamba_head_dim, groups=args.mamba_num_groups,
        state=args.mamba_state_dim or 128, conv_kernel=args.mamba_conv_kernel, conv_bias=args.mamba_use_bias_in_conv,
        bias=args.mamba_use_bias_in_linears, norm_eps=norm_spec(args).eps, chunk=args.mamba_chunk_size,
        time_step_limit=(low, high), fp32_params=args.mamba_selective_fp32_params, state_fp32=args.mamba_state_fp32,
        lora=lora_spec(args, block),
    )  # fmt: skip


class StateMixer(nn.Module):
    """The common parts of mixers with states. Their last linear layer is `out_proj`."""

    module_name = "mixer"
    out_proj: Linear

    @property
    def output(self) -> Linear:
        return self.out_proj


class Convolution(nn.Module):
    """The causal convolution of each channel, usually followed by silu.

    A context rank convolves each of its chunks after the last inputs of the chunk before it.

    Parameters: `weight` `[channels, 1, k]` and `bias`.
    kernel: `ScanKernels.convolution`, a package's kernel with silu; None: torch's operations.
    silu: false: silu does not follow.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        params: tuple[ParamSpec, ...],
        groups: ParallelGroups,
        kernel: Callable[..., Tensor] | None,
        silu: bool = True,
    ) -> None:
        super().__init__()
        self.kernel, self.context_group, self.silu = kernel, groups.group("context"), silu
        allocate(self, params, groups, "bias")

    @staticmethod
    def params(blocks: tuple[int, ...], width: int, bias: bool) -> tuple[ParamSpec, ...]:
        """Returns the specs of weight and bias. blocks: sizes of groups of channels, each sharded over tensor
        ranks separately. width: k."""
        channels = sum(blocks)
        weight = ParamSpec("weight", (channels, 1, width), 0, blocks, "kaiming_uniform", weight_decay=True)
        return (weight, ParamSpec("bias", (channels,), 0, blocks)) if bias else (weight,)

    def forward(self, x: Tensor, inputs: StateInputs, cache: StateCache | None) -> Tensor:
        """Returns the convolved x, `[seq, batch, channels/T]` as x. It also updates the cache, if
        there is one."""
        if inputs.chunks is not None and self.context_group is not None:
            width = self.weight.shape[-1] - 1
            longer, documents = with_tails(x, width, inputs.chunks, self.context_group)
            return without_tails(self(longer, StateInputs(documents), None), width)
        if self.kernel is not None and cache is None:
            return self.kernel(x, self.weight, self.bias, inputs)
        history = cache.inputs() if cache is not None and inputs.continues else None
        if cache is not None:
            cache.put_inputs(last_inputs(x, self.weight.shape[-1] - 1, inputs, history))
        convolved = causal_convolution(x, self.weight, self.bias, inputs.documents, history)
        return F.silu(convolved) if self.silu else convolved


class Mamba(StateMixer):
    """Mamba's mixer over this rank's channels; input and output are `[seq, batch, hidden]`.

    Parameters are named as in GPT-NeoX and mamba_ssm: `in_proj` (rows of x, then of the gate z), `conv1d`,
    `x_proj` (rows of time steps, B, C), `dt_proj`, `A_log` `[channels, state]`, `D` `[channels]`, `out_proj`.

    Channels are sharded over tensor ranks. B, C and the input of `dt_proj` are summed over all tensor ranks.
    """

    Spec = MambaSpec
    spec = staticmethod(mamba_spec)
    A_log: nn.Parameter
    D: nn.Parameter

    def __init__(
        self, spec: MambaSpec, groups: ParallelGroups, sequence_parallel: bool = False, *, backends: ScanKernels
    ) -> None:
        super().__init__()
        self.widths = (spec.dt_rank, spec.state, spec.state)
        self.norm_eps, self.group, self.kernels = spec.norm_eps, groups.group("tensor"), backends
        self.state_fp32 = spec.state_fp32
        own_params, conv, time_step = self._own_params(spec)
        allocate(self, own_params, groups)
        in_spec, chosen, out = self._linears(spec)
        self.in_proj = Linear(in_spec, groups, sequence_parallel)
        self.conv1d = Convolution(conv, groups, backends.convolution)
        # Without sequence_parallel: its summed output is full on every rank, also under sequence parallelism.
        self.x_proj = Linear(chosen, groups)
        self.dt_proj = _TimeStep(time_step, groups)
        self.out_proj = Linear(out, groups, sequence_parallel)

    @staticmethod
    def _own_params(spec: MambaSpec) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
        channels = (spec.inner,)
        return (
            (
                ParamSpec("A_log", (spec.inner, spec.state), 0, channels, "log_of_column", precise=spec.fp32_params),
                ParamSpec("D", channels, 0, channels, "ones", precise=spec.fp32_params),
            ),
            Convolution.params(channels, spec.conv_kernel, spec.conv_bias),
            (
                ParamSpec(
                    "weight", (spec.inner, spec.dt_rank), 0, channels, "kaiming_uniform", weight_decay=True
                ),
                ParamSpec("bias", channels, 0, channels, "time_step"),
            ),
        )  # fmt: skip

    @staticmethod
    def _linears(spec: MambaSpec) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        x_and_z, chosen = (spec.inner, spec.inner), (spec.dt_rank, spec.state, spec.state)
        return (
            LinearSpec(
                spec.hidden, 2 * spec.inner, "column", spec.bias, x_and_z,
                adapters=adapters_of(spec.lora, 2 * spec.inner, "in_proj"),
            ),
            LinearSpec(
                spec.inner, sum(chosen), "row", spec.bias, projections=chosen,
                adapters=adapters_of(spec.lora, sum(chosen), "x_proj"),
            ),
            LinearSpec(spec.inner, spec.hidden, "row", spec.bias),
        )  # fmt: skip

    @classmethod
    def params(cls, spec: MambaSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates, in GPT-NeoX's registration
        order."""
        own_params, conv, time_step = cls._own_params(spec)
        in_proj, chosen, out = (linear.params() for linear in cls._linears(spec))
        chosen = tuple(replace(param, init="input") if param.name == "weight" else param for param in chosen)
        return (
            *own_params,
            *with_prefix("in_proj", in_proj),
            *with_prefix("conv1d", conv),
            *with_prefix("x_proj", chosen),
            *with_prefix("dt_proj", time_step),
            *with_prefix("out_proj", out),
        )

    @staticmethod
    def state_shapes(spec: MambaSpec, size: int, dtype: torch.dtype) -> StateShapes:
        """Returns the shapes of the cache that one tensor rank keeps for each text in generation.

        size: number of tensor ranks. dtype: of the weights.
        """
        channels = spec.inner // size
        state_dtype = torch.float32 if spec.state_fp32 else dtype
        return StateShapes((spec.conv_kernel - 1, channels), (channels, spec.state), state_dtype)

    def core(
        self,
        x: Tensor,
        inputs: StateInputs,
        seed: Tensor | None = None,
        cache: StateCache | None = None,
        adapter_seed: Tensor | None = None,
    ) -> Tensor:
        """Computes the mixer without `out_proj`: `[seq, batch, hidden]` to `[seq, batch, channels/T]`.

        seed: not used, since the mixer has no dropout.
        cache: the state of earlier tokens in generation; None in training.
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        x, z = self.in_proj(x, adapter_seed).chunk(2, dim=-1)
        x = self.conv1d(x, inputs, cache)
        dt, b, c = copy_to_tensor(self.x_proj(x, adapter_seed), self.group).split(self.widths, dim=-1)
        if self.norm_eps is not None:
            dt, b, c = (F.rms_norm(tensor, tensor.shape[-1:], eps=self.norm_eps) for tensor in (dt, b, c))
        dt, a, begins = F.linear(dt, self.dt_proj.weight), -torch.exp(self.A_log.float()), None
        if self.kernels.selective is not None and cache is None and inputs.documents is None:
            return self.kernels.selective(x, dt, self.dt_proj.bias, a, b, c, self.D, z)
        dtype = torch.float32 if self.state_fp32 else x.dtype
        dt = _steps(dt.float() + self.dt_proj.bias.float(), inputs)
        if inputs.documents is not None:
            numbers = inputs.documents
            begins = torch.cat([torch.zeros_like(numbers[:1]), numbers[:-1]]) != numbers
        scanned, dt, a, b, c = (tensor.to(dtype) for tensor in (x, dt, a, b, c))
        y, last = selective_scan(scanned, dt, a, b, c, begins, initial_state(cache, inputs, dtype))
        if cache is not None:
            cache.put_state(last)
        y = y.float() + x.float() * self.D.float()
        return (y * F.silu(z.float())).to(x.dtype)


class _TimeStep(nn.Module):
    """Holds the weight and bias that project time steps to this rank's channels.

    It is not a `Linear`, for two reasons. Its input is copied to the tensor ranks together with B and C, so
    that their gradients need only one all-reduce. And some kernels add the bias themselves.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, params: tuple[ParamSpec, ...], groups: ParallelGroups) -> None:
        super().__init__()
        allocate(self, params, groups)


class Mamba2(StateMixer):
    """Mamba 2's mixer over this rank's heads; input and output are `[seq, batch, hidden]`.

    Parameters are named as in mamba_ssm: `in_proj` (rows of the gate z, x, B, C, time steps), `conv1d` over
    x, B and C, `dt_bias`, `A_log` and `D` `[heads]`, the gated norm's `norm.weight`, `out_proj`.

    Each tensor rank has full groups of heads. If there are more ranks than groups, a rank has a slice of one
    group's B and C, and gathers the full B and C for its heads.
    """

    Spec = Mamba2Spec
    spec = staticmethod(mamba2_spec)
    dt_bias: nn.Parameter
    A_log: nn.Parameter
    D: nn.Parameter

    def __init__(
        self, spec: Mamba2Spec, groups: ParallelGroups, sequence_parallel: bool = False, *, backends: ScanKernels
    ) -> None:
        super().__init__()
        size = groups.size("tensor")
        self.mixer_spec, self.kernels = spec, backends
        inner, self.head_dim, self.group = spec.inner // size, spec.head_dim, groups.group("tensor")
        self.context_group = groups.group("context")
        self.groups, self.sharers = share_out(spec.groups, size)
        shared = spec.groups * spec.state // size
        self.projected, self.convolved = (inner, inner + 2 * shared, spec.heads // size), (inner, shared, shared)
        self.chunk, self.limit, self.state_fp32 = spec.chunk, spec.time_step_limit, spec.state_fp32
        own_params, conv, norm = self._own_params(spec)
        allocate(self, own_params, groups)
        in_spec, out = self._linears(spec)
        self.in_proj = Linear(in_spec, groups, sequence_parallel)
        self.conv1d = Convolution(conv, groups, backends.convolution)
        self.norm = GatedNorm(norm, spec.groups, spec.norm_eps, groups)
        self.out_proj = Linear(out, groups, sequence_parallel)

    @staticmethod
    def _own_params(spec: Mamba2Spec) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
        heads, shared = (spec.heads,), spec.groups * spec.state
        return (
            (
                ParamSpec("dt_bias", heads, 0, heads, "time_step"),
                ParamSpec("A_log", heads, 0, heads, "log_of_uniform", precise=spec.fp32_params),
                ParamSpec("D", heads, 0, heads, "ones", precise=spec.fp32_params),
            ),
            Convolution.params((spec.inner, shared, shared), spec.conv_kernel, spec.conv_bias),
            (ParamSpec("weight", (spec.inner,), 0, (spec.inner,), "ones"),),
        )

    @staticmethod
    def _linears(spec: Mamba2Spec) -> tuple[LinearSpec, LinearSpec]:
        shared = spec.groups * spec.state
        rows = (spec.inner, spec.inner, shared, shared, spec.heads)
        return (
            LinearSpec(
                spec.hidden, sum(rows), "column", spec.bias, rows,
                adapters=adapters_of(spec.lora, sum(rows), "in_proj"),
            ),
            LinearSpec(spec.inner, spec.hidden, "row", spec.bias),
        )  # fmt: skip

    @classmethod
    def params(cls, spec: Mamba2Spec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates, in mamba_ssm's registration
        order."""
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
    def state_shapes(spec: Mamba2Spec, size: int, dtype: torch.dtype) -> StateShapes:
        """Returns the shapes of the cache that one tensor rank keeps for each text in generation.

        size: number of tensor ranks. dtype: of the weights.
        """
        channels = (spec.inner + 2 * spec.groups * spec.state) // size
        state = (spec.heads // size, spec.head_dim, spec.state)
        return StateShapes((spec.conv_kernel - 1, channels), state, torch.float32 if spec.state_fp32 else dtype)

    def core(
        self,
        x: Tensor,
        inputs: StateInputs,
        seed: Tensor | None = None,
        cache: StateCache | None = None,
        adapter_seed: Tensor | None = None,
    ) -> Tensor:
        """Computes the mixer without `out_proj`: `[seq, batch, hidden]` to `[seq, batch, channels/T]`.

        seed: not used, since the mixer has no dropout.
        cache: the state of earlier tokens in generation; None in training.
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        z, xbc, dt = self.in_proj(x, adapter_seed).split(self.projected, dim=-1)
        x, b, c = self.conv1d(xbc, inputs, cache).split(self.convolved, dim=-1)
        x = x.unflatten(2, (-1, self.head_dim))
        if self.sharers > 1:
            b, c = gather_from_sharers(torch.stack([b, c]), self.group, self.sharers).unbind(0)
        b, c = (tensor.unflatten(2, (self.groups, -1)) for tensor in (b, c))
        a, dtype = -torch.exp(self.A_log.float()), torch.float32 if self.state_fp32 else x.dtype
        if self.kernels.chunked is not None and cache is None:
            y = self.kernels.chunked(x, dt, self.dt_bias, a, b, c, self.D, self.mixer_spec, inputs).float()
            steps = _steps(dt.float() + self.dt_bias.float(), inputs, self.limit)
            return self.norm((y + self._from_earlier(x, steps, a, b, c, inputs)).flatten(2), z).to(z.dtype)
        dt = _steps(dt.float() + self.dt_bias.float(), inputs, self.limit)
        scan = partial(
            chunk_scan, chunk=self.chunk, documents=inputs.documents, initial=initial_state(cache, inputs, dtype),
            state_dtype=dtype,
        )  # fmt: skip
        y, last = recomputed(scan, x, dt, a, b, c)
        if cache is not None:
            cache.put_state(last)
        y = y.float() + x.float() * self.D.float().unsqueeze(1) + self._from_earlier(x, dt, a, b, c, inputs)
        return self.norm(y.flatten(2), z).to(z.dtype)

    def _from_earlier(
        self, x: Tensor, steps: Tensor, a: Tensor, b: Tensor, c: Tensor, inputs: StateInputs
    ) -> Tensor | float:
        """Returns what the states before this context rank's chunks add to the outputs; 0.0 if it has full
        rows."""
        if inputs.chunks is None or self.context_group is None:
            return 0.0
        return from_earlier_chunks(x, steps, a, b, c, inputs.chunks, self.context_group, recomputed)


class GatedNorm(nn.Module):
    """Computes RMSNorm of y silu(z) within each group of heads, times `weight`, in fp32.

    The norm comes after the gate, as in mamba_ssm's `RMSNormGated` with `norm_before_gate=False`.
    """

    weight: nn.Parameter

    def __init__(self, params: tuple[ParamSpec, ...], number: int, eps: float, groups: ParallelGroups) -> None:
        """number: number of groups of heads, over all tensor ranks."""
        super().__init__()
        self.number, self.sharers = share_out(number, groups.size("tensor"))
        self.group, self.eps = groups.group("tensor"), eps
        allocate(self, params, groups)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Returns the norm of y silu(z) times `weight`, in fp32. y, z: `[seq, batch, channels/T]`."""
        gated = (y * F.silu(z.float())).unflatten(2, (self.number, -1))
        if self.sharers == 1:
            return F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(2) * self.weight.float()
        squares = gather_from_sharers(gated.square().mean(-1, keepdim=True), self.group, self.sharers)
        root = (squares.mean(-1, keepdim=True) + self.eps).rsqrt()
        return (gated * root).flatten(2) * self.weight.float()


def _steps(dt: Tensor, inputs: StateInputs, limit: tuple[float, float] | None = None) -> Tensor:
    """Returns time steps: softplus of dt (fp32), clamped to `limit` (lowest, highest).

    Padding gets 0, which leaves states unchanged.
    """
    dt = F.softplus(dt)
    if limit is not None and limit != (0.0, float("inf")):
        dt = dt.clamp(*limit)
    return dt if inputs.filled is None else dt.masked_fill(~inputs.filled.unsqueeze(2), 0.0)


def initial_state(cache: StateCache | None, inputs: StateInputs, dtype: torch.dtype) -> Tensor | None:
    """Returns the states in the cache before these tokens; None if rows start without a state."""
    return cache.state().to(dtype) if cache is not None and inputs.continues else None


def recomputed(scan: Callable[..., Computed], *inputs: Any) -> Computed:
    """Returns `scan(*inputs)` without saving its intermediate values; the backward pass computes them again.

    They hold a number for each pair of tokens in a chunk, which is more memory than everything else in a
    block.
    """
    if not torch.is_grad_enabled():
        return scan(*inputs)
    result: Computed = checkpoint(scan, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
