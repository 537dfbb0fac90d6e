"""Attention backends of packages that users install themselves: flash-attn and Transformer-Engine.

`auto` never chooses them.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.model.attention.backends import (
    AttentionBackend,
    AttentionCall,
    AttentionOptions,
    rows_in_one,
)
from megatron.model.attention.inputs import AttentionInputs
from megatron.mpu import fork_seed
from megatron.neox_arguments.optional_packages import PackageProblem, import_compiled


class PackageBackend(AttentionBackend):
    """Base of attention backends from a compiled package. `auto` never chooses them, because their import
    takes seconds.

    module: the module to import. functions: attributes that it must have.
    """

    opt_in = True
    module: ClassVar[str]
    functions: ClassVar[tuple[str, ...]]

    def missing(self) -> str | None:
        try:
            _ = self.package  # imports it before a step is compiled, because the compiler cannot trace an import
        except PackageProblem as problem:
            return str(problem)
        return None

    @cached_property
    def package(self) -> Any:
        """The imported module of the package. Raises PackageProblem if it cannot be imported."""
        return import_compiled(self.module, *self.functions)

    def supports(self, call: AttentionCall) -> str | None:
        if call.masked or call.spec.biased:
            return "it supports neither masks nor position biases"
        try:
            return super().supports(call)
        except (AssertionError, ValueError, NotImplementedError) as problem:  # raised for unsupported shapes
            return (str(problem) or type(problem).__name__).splitlines()[0]


class FlashAttn(PackageBackend):
    """The flash-attn package (`flash_attn_func`, `flash_attn_varlen_func`; arXiv 2307.08691).

    It supports documents without a mask, windows, dropout and grouped queries. It is deterministic if torch
    is set to use deterministic algorithms.
    """

    module, functions = "flash_attn", ("flash_attn_func", "flash_attn_varlen_func")
    caps_logits, takes_runs = True, True

    def supports(self, call: AttentionCall) -> str | None:
        if call.compiled and call.spec.dropout > 0.0:
            return "its dropout cannot be compiled; set compile: false"
        return super().supports(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        package, starts = self.package, inputs.cu_seqlens
        keywords = {
            "dropout_p": options.dropout_p,
            "softmax_scale": options.scale,
            "causal": True,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            **({} if options.softcap is None else {"softcap": options.softcap}),  # flash-attn has softcap since 2.6
        }
        rows = [x.transpose(0, 1) for x in (q, k, v)]
        if starts is None:
            attend = partial(package.flash_attn_func, *rows, **keywords)
        else:
            assert inputs.longest is not None
            longest, runs, window = inputs.longest, inputs.runs, (inputs.window, 0)
            key_starts, longest_keys = (starts, longest) if runs is None else (runs.starts, runs.longest)
            tokens = [rows_in_one(x) for x in (q, k, v)]
            attend = partial(
                package.flash_attn_varlen_func, *tokens, cu_seqlens_q=starts, cu_seqlens_k=key_starts,
                max_seqlen_q=longest.shape[0], max_seqlen_k=longest_keys.shape[0], window_size=window, **keywords,
            )  # fmt: skip
        return _run_seeded(attend, options, q.device).view(rows[0].shape).transpose(0, 1)


@dataclass(frozen=True)
class TransformerEngineAttention(PackageBackend):
    """Transformer-Engine's `DotProductAttention`, which chooses among its own, cuDNN's and flash-attn's
    kernels.

    It supports documents without a mask, windows, dropout and grouped queries.

    modules: one `DotProductAttention` for each combination of head sizes, dropout and scale; they have no
        parameters.
    """

    module, functions = "transformer_engine.pytorch", ("DotProductAttention",)
    modules: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def supports(self, call: AttentionCall) -> str | None:
        return "it cannot be compiled by torch; set compile: false" if call.compiled else super().supports(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        shape, starts = q.shape, inputs.cu_seqlens
        attention = self._module(shape[2], shape[3], k.shape[2], options)
        if starts is None:
            attend = partial(attention, q, k, v, qkv_format="sbhd", attn_mask_type="causal")
            return _run_seeded(attend, options, q.device).view(shape)
        assert inputs.longest is not None
        longest, window = inputs.longest.shape[0], (inputs.window, 0)
        tokens = [x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)]
        attend = partial(
            attention, *tokens, qkv_format="thd", attn_mask_type="padding_causal", window_size=window,
            cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest,
        )  # fmt: skip
        return _run_seeded(attend, options, q.device).view(shape[1], shape[0], *shape[2:]).transpose(0, 1)

    def _module(self, heads: int, head_dim: int, kv_heads: int, options: AttentionOptions) -> Any:
        key = (heads, head_dim, kv_heads, options.dropout_p, options.scale)
        if key not in self.modules:
            self.modules[key] = self.package.DotProductAttention(
                heads, head_dim, num_gqa_groups=kv_heads, attention_dropout=options.dropout_p,
                softmax_scale=options.scale,
            )  # fmt: skip
        return self.modules[key]


def _run_seeded(attend: partial[Tensor], options: AttentionOptions, device: torch.device) -> Tensor:
    if options.dropout_p == 0.0 or options.seed is None:
        return attend()
    with fork_seed(int(options.seed), device):
        return attend()
