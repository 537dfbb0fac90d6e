"""Gated DeltaNet and Kimi Delta Attention as mixers of a block.

Both project queries, keys and values, convolve them over a few tokens, and run the delta rule over this
rank's heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.build_specs import lora_spec, norm_spec
from megatron.model.cache import StateCache, StateShapes
from megatron.model.delta.context import scan_shared_rows
from megatron.model.delta.rule import chunk_delta_rule, unit_length
from megatron.model.mamba.inputs import StateInputs
from megatron.model.mamba.mixers import Convolution, StateMixer, initial_state, recomputed
from megatron.model.mamba.packages import ScanKernels
from megatron.model.specs import GatedDeltaNetSpec, KimiDeltaAttentionSpec
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
from megatron.neox_arguments import ModelArgs


def gated_delta_net_spec(args: ModelArgs, block: int) -> GatedDeltaNetSpec | None:
    """Returns the Gated DeltaNet of block number `block`, counted from 0; None if the block has another
    mixer."""
    return GatedDeltaNetSpec(**_sizes(args, block)) if args.attention_config[block] == "gated_delta_net" else None


def kimi_delta_attention_spec(args: ModelArgs, block: int) -> KimiDeltaAttentionSpec | None:
    """Returns the Kimi Delta Attention of block number `block`, counted from 0; None if the block has another
    mixer."""
    is_kimi = args.attention_config[block] == "kimi_delta_attention"
    return KimiDeltaAttentionSpec(**_sizes(args, block)) if is_kimi else None


def _sizes(args: ModelArgs, block: int) -> dict[str, Any]:
    return {
        "hidden": args.hidden_size, "key_heads": args.linear_num_key_heads, "heads": args.linear_num_value_heads,
        "key_dim": args.linear_key_head_dim, "value_dim": args.linear_value_head_dim,
        "conv_kernel": args.linear_conv_kernel_dim, "norm_eps": norm_spec(args).eps, "chunk": args.linear_chunk_size,
        "fp32_params": args.mamba_selective_fp32_params, "lora": lora_spec(args, block),
    }  # fmt: skip


class _DeltaMixer(StateMixer):
    """The parts that both mixers share: convolution, scan, and the norm of its output."""

    in_proj: Linear
    conv1d: "Convolution"
    scan: "DeltaScan"
    norm: "_GatedHeadNorm"
    dt_bias: nn.Parameter
    A_log: nn.Parameter

    def __init__(self, spec: GatedDeltaNetSpec, groups: ParallelGroups, kernel: Callable[..., Tensor] | None) -> None:
        """kernel: a package's delta rule, as in `ScanKernels`; None: torch's operations."""
        super().__init__()
        self.kernel = kernel
        size = groups.size("tensor")
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim
        self.convolved = (spec.keys // size, spec.keys // size, spec.values // size)

    @staticmethod
    def state_shapes(spec: GatedDeltaNetSpec, size: int, dtype: torch.dtype) -> StateShapes:
        """Returns the shapes of the cache that one tensor rank keeps for each text in generation.

        size: number of tensor ranks. dtype: of the weights; states are fp32.
        """
        channels = (2 * spec.keys + spec.values) // size
        state = (spec.heads // size, spec.key_dim, spec.value_dim)
        return StateShapes((spec.conv_kernel - 1, channels), state, torch.float32)

    def read(
        self,
        qkv: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        inputs: StateInputs,
        cache: StateCache | None,
    ) -> Tensor:
        """Returns what queries read from the states, fp32 `[seq, batch, heads/T, value_dim]`.

        qkv: projected queries, keys and values, before the convolution.
        log_decay, rate: as in `model.delta.rule`; rate before the sigmoid.
        """
        q, k, v = self.conv1d(qkv, inputs, cache).split(self.convolved, dim=-1)
        q, k = (unit_length(part.unflatten(2, (-1, self.key_dim))) for part in (q, k))
        q, v, rate = q * self.key_dim**-0.5, v.unflatten(2, (-1, self.value_dim)), rate.float().sigmoid()
        if inputs.filled is not None:  # padding changes no state
            padding = ~inputs.filled.unsqueeze(2)
            rate = rate.masked_fill(padding, 0.0)
            log_decay = log_decay.masked_fill(padding if log_decay.dim() == 3 else padding.unsqueeze(3), 0.0)
        if self.kernel is not None and cache is None:
            return self.kernel(q, k, v, log_decay, rate, inputs)
        y, last = self.scan(q, k, v, log_decay, rate, inputs, initial_state(cache, inputs, torch.float32))
        if cache is not None:
            cache.put_state(last)
        return y


class GatedDeltaNet(_DeltaMixer):
    """Gated DeltaNet over this rank's heads; input and output are `[seq, batch, hidden]`.

    Parameters are named as in HuggingFace's Qwen 3-Next: `in_proj` (rows of queries, keys, values, the gate
    z, rates, decays), `conv1d` over queries, keys and values, `dt_bias` and `A_log` `[heads]`, `norm.weight`
    `[value_dim]`, `out_proj`.

    Each tensor rank has some heads of queries and keys, and the heads of values that share these.
    """

    Spec = GatedDeltaNetSpec
    spec = staticmethod(gated_delta_net_spec)

    def __init__(
        self,
        spec: GatedDeltaNetSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: ScanKernels,
    ) -> None:
        super().__init__(spec, groups, backends.gated_delta)
        values, heads = spec.values // groups.size("tensor"), spec.heads // groups.size("tensor")
        self.projected = (sum(self.convolved), values, heads, heads)
        own_params, conv, norm = self._own_params(spec)
        allocate(self, own_params, groups)
        in_spec, out = self._linears(spec)
        self.in_proj = Linear(in_spec, groups, sequence_parallel)
        self.conv1d = Convolution(conv, groups, None)
        self.scan = DeltaScan(spec.chunk, groups)
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
        names: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")  # Qwen 3-Next's
        pattern: tuple[int, ...] = (sum(rows[:4]), sum(rows[4:]))
        if spec.lora is not None and spec.lora.targets.keys().isdisjoint(names):  # Qwen 3.5's
            names, pattern = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), (sum(rows[:3]), *rows[3:])
        adapters = adapters_of(spec.lora, sum(rows), None, names, pattern, pattern_sharded=True)
        return (
            LinearSpec(spec.hidden, sum(rows), "column", False, rows, adapters=adapters),
            LinearSpec(
                spec.values, spec.hidden, "row", False, adapters=adapters_of(spec.lora, spec.hidden, "out_proj")
            ),
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
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        qkv, z, rate, step = self.in_proj(x, adapter_seed).split(self.projected, dim=-1)
        log_decay = -torch.exp(self.A_log.float()) * F.softplus(step.float() + self.dt_bias.float())
        y = self.read(qkv, log_decay, rate, inputs, cache)
        return self.norm(y, F.silu(z.unflatten(2, (-1, self.value_dim)).float())).flatten(2).to(x.dtype)


class KimiDeltaAttention(_DeltaMixer):
    """Kimi Delta Attention over this rank's heads; input and output are `[seq, batch, hidden]`.

    Each dimension of a key has its decay. Decays and the gate come from projections of low rank, whose
    first halves (f_a_proj, g_a_proj) each tensor rank computes for all tokens, or for its part of the
    sequence under sequence parallelism.

    Parameters are named as in HuggingFace's Kimi Linear: `in_proj` (rows of queries, keys, values, rates),
    `conv1d` over queries, keys and values, `f_a_proj` and `f_b_proj` of decays, `dt_bias` `[keys]`, `A_log`
    `[heads]`, `g_a_proj` and `g_b_proj` of the gate, `norm.weight` `[value_dim]`, `out_proj`.
    """

    Spec = KimiDeltaAttentionSpec
    spec = staticmethod(kimi_delta_attention_spec)
    f_a_proj: Linear
    f_b_proj: Linear
    g_a_proj: Linear
    g_b_proj: Linear

    def __init__(
        self,
        spec: KimiDeltaAttentionSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: ScanKernels,
    ) -> None:
        super().__init__(spec, groups, backends.kimi_delta)
        self.projected = (sum(self.convolved), spec.heads // groups.size("tensor"))
        own_params, conv, norm = self._own_params(spec)
        allocate(self, own_params, groups)
        for name, linear in self._linears(spec).items():
            setattr(self, name, Linear(linear, groups, sequence_parallel))
        self.conv1d = Convolution(conv, groups, None)
        self.scan = DeltaScan(spec.chunk, groups)
        self.norm = _GatedHeadNorm(norm, spec.norm_eps, groups)

    @staticmethod
    def _own_params(
        spec: KimiDeltaAttentionSpec,
    ) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
        keys, heads = (spec.keys,), (spec.heads,)
        return (
            (
                ParamSpec("dt_bias", keys, 0, keys, "time_step"),
                ParamSpec("A_log", heads, 0, heads, "log_of_uniform", precise=spec.fp32_params),
            ),
            Convolution.params((spec.keys, spec.keys, spec.values), spec.conv_kernel, bias=False),
            (ParamSpec("weight", (spec.value_dim,), init="ones"),),
        )

    @staticmethod
    def _linears(spec: KimiDeltaAttentionSpec) -> dict[str, LinearSpec]:
        rows, names = (spec.keys, spec.keys, spec.values, spec.heads), ("q_proj", "k_proj", "v_proj", "b_proj")
        adapters = adapters_of(spec.lora, sum(rows), None, names, rows, pattern_sharded=True)
        linears = {
            "f_a_proj": LinearSpec(spec.hidden, spec.key_dim, "none", False),
            "f_b_proj": LinearSpec(spec.key_dim, spec.keys, "column", False),
            "g_a_proj": LinearSpec(spec.hidden, spec.value_dim, "none", False),
            "g_b_proj": LinearSpec(spec.value_dim, spec.values, "column", False),
        }
        out_adapters = adapters_of(spec.lora, spec.hidden, "o_proj")
        return {
            "in_proj": LinearSpec(spec.hidden, sum(rows), "column", False, rows, adapters=adapters),
            **{
                name: replace(linear, adapters=adapters_of(spec.lora, linear.out_features, name))
                for name, linear in linears.items()
            },
            "out_proj": LinearSpec(spec.values, spec.hidden, "row", False, adapters=out_adapters),
        }

    @classmethod
    def params(cls, spec: KimiDeltaAttentionSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates."""
        own_params, conv, norm = cls._own_params(spec)
        linears = {name: linear.params() for name, linear in cls._linears(spec).items()}
        parts = {**linears, "conv1d": conv, "norm": norm}
        return (*own_params, *(param for name, specs in parts.items() for param in with_prefix(name, specs)))

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
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        qkv, rate = self.in_proj(x, adapter_seed).split(self.projected, dim=-1)
        step = self.f_b_proj(self.f_a_proj(x, adapter_seed), adapter_seed)
        step = F.softplus(step.float() + self.dt_bias.float())
        log_decay = -torch.exp(self.A_log.float()).unsqueeze(1) * step.unflatten(2, (-1, self.key_dim))
        y = self.read(qkv, log_decay, rate, inputs, cache)
        gate = self.g_b_proj(self.g_a_proj(x, adapter_seed), adapter_seed).unflatten(2, (-1, self.value_dim))
        return self.norm(y, gate.float().sigmoid()).flatten(2).to(x.dtype)


class DeltaScan(nn.Module):
    """The delta rule over chunks of tokens, whose backward pass computes it again.

    A module, so that compiled blocks can leave it out: compiled code would have a copy of its loop for each
    chunk.
    """

    def __init__(self, chunk: int, groups: ParallelGroups) -> None:
        super().__init__()
        self.rule, self.context_group = partial(chunk_delta_rule, chunk=chunk), groups.group("context")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        inputs: StateInputs,
        initial: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (y, last state), as `chunk_delta_rule` does for the same arguments.

        Of rows that context ranks share no rank returns the last state.
        """
        if inputs.chunks is not None and self.context_group is not None:
            return scan_shared_rows(self.rule, q, k, v, log_decay, rate, inputs.chunks, self.context_group), None
        rule = partial(self.rule, documents=inputs.documents, initial=initial)
        return recomputed(rule, q, k, v, log_decay, rate)


class _GatedHeadNorm(nn.Module):
    """Computes RMSNorm of each head of y, times `weight`, which all heads share, times a gate, in fp32."""

    weight: nn.Parameter

    def __init__(self, params: tuple[ParamSpec, ...], eps: float, groups: ParallelGroups) -> None:
        super().__init__()
        self.group, self.eps = groups.group("tensor"), eps
        allocate(self, params, groups)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Returns the gated norm of y in fp32. y, gate: fp32 `[seq, batch, heads/T, value_dim]`."""
        weight = copy_to_tensor(self.weight, self.group).float()
        return F.rms_norm(y, self.weight.shape, None, self.eps) * weight * gate
