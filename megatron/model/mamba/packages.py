"""Kernels of installed packages that replace torch's operations in blocks with states (`mamba_backend`).

mamba_ssm and flash-linear-attention (fla) compute scans, causal-conv1d the convolution before Mamba's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.model.mamba.inputs import StateInputs
from megatron.model.specs import GatedDeltaNetSpec, KimiDeltaAttentionSpec, Mamba2Spec, MambaSpec
from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.optional_packages import PackageProblem, import_compiled

_SELECTIVE = ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
_CHUNKED = ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
_GLA = ("fla.ops.simple_gla", "chunk_simple_gla")
_DELTA_RULES = {
    GatedDeltaNetSpec: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    KimiDeltaAttentionSpec: ("fla.ops.kda", "chunk_kda"),
}
_MOST_KEYS = 256  # the widest keys that fla's kernels of delta rules support
_MOST_STATES = 256  # the largest state dimension that mamba_ssm's kernels support
_CONVOLUTION = ("causal_conv1d", "causal_conv1d_fn")


@dataclass(frozen=True)
class ScanKernels:
    """The kernels of mixers with states in training. A kernel that is None uses torch's operations; so does
    generation (cached states).

    package: who provides the scans: torch, or a value of `mamba_backend`.
    selective: Mamba's scan, not for packed documents: from (x, dt, bias of dt, a, b, c, d, gate z) to the
        gated output. Shapes are as in `selective_scan`; dt is before softplus.
    chunked: Mamba 2's scan: from (x, dt, bias of dt, a, b, c, d, spec, inputs) to the output before the gated
        norm. Shapes are as in `chunk_scan`; dt is before softplus.
    convolution: convolution and silu: from (x `[seq, batch, channels]`, weight, bias, inputs) to `[seq,
        batch, channels]`.
    gated_delta, kimi_delta: delta rules, of Gated DeltaNet and of Kimi Delta Attention: from (q, k, v,
        log_decay, rate, inputs) to what queries read, fp32. Shapes are as in `model.delta.rule`.
    """

    package: str = "torch"
    selective: Callable[..., Tensor] | None = None
    chunked: Callable[..., Tensor] | None = None
    convolution: Callable[..., Tensor] | None = None
    gated_delta: Callable[..., Tensor] | None = None
    kimi_delta: Callable[..., Tensor] | None = None


def choose_scans(
    args: ModelArgs,
    device: torch.device,
    specs: Sequence[MambaSpec | Mamba2Spec],
    log: Callable[[str], None] | None = None,
) -> ScanKernels:
    """Returns the kernels that `mamba_backend` selects for these mixers, and logs the choice.

    Raises ConfigError if the package that `mamba_backend` names is not installed, or does not support the
    run.
    """
    requested, kinds = args.mamba_backend, {type(spec) for spec in specs}
    if requested == "torch":
        return ScanKernels()
    names: tuple[str, ...] = ("mamba_ssm", "fla") if requested == "auto" else (requested,)
    passed_over: list[str] = []
    if requested == "auto" and device.type != "cuda":
        names, passed_over = (), ["mamba_ssm and fla need a GPU"]
    for name in names:
        if requested == "auto":
            reason = not_run_on(f"mamba_backend: {name}", capability_of(device))
            if reason is None and name == "fla" and (MambaSpec in kinds or args.mamba_state_fp32):
                reason = "it supports only Mamba 2 with mamba_state_fp32: false"
            if reason is not None:
                passed_over.append(f"{name}: {reason}")
                continue
        try:
            largest = max(spec.state for spec in specs)
            if name == "mamba_ssm" and largest > _MOST_STATES:
                raise PackageProblem(f"a mamba_state_dim of at most {_MOST_STATES}, not {largest}")
            chosen = _kernels_of_package(name, kinds, _convolves(specs, args.tp))
        except PackageProblem as problem:
            if requested != "auto":
                raise args.error("mamba_backend", f"{name} needs {problem}; or set mamba_backend: torch") from None
            passed_over.append(f"{name}: {str(problem).partition(':')[0]}")
            continue
        convolution = "causal-conv1d" if chosen.convolution is not None else "torch's convolution"
        fallback = (
            "; generation and Mamba 1 on packed documents use torch"
            if MambaSpec in kinds
            else "; generation uses torch"
        )
        _say(log, requested, f"{name} with {convolution}{fallback}")
        return chosen
    _say(log, requested, f"torch ({'; '.join(passed_over)})")
    return ScanKernels()


def with_delta_rules(
    scans: ScanKernels, args: ModelArgs, specs: Sequence[GatedDeltaNetSpec], log: Callable[[str], None] | None = None
) -> ScanKernels:
    """Returns `scans` with fla's kernels for these delta rules, if `mamba_backend` is fla, and logs a line.

    No other value selects them. Raises ConfigError if fla is not installed, or does not support a rule.
    """
    if args.mamba_backend != "fla" or not specs:
        return scans
    kernels: dict[type, Callable[..., Tensor]] = {}
    try:
        if (widest := max(spec.key_dim for spec in specs)) > _MOST_KEYS:
            raise PackageProblem(f"a linear_key_head_dim of at most {_MOST_KEYS}, not {widest}")
        for kind in {type(spec) for spec in specs}:
            module, function = _DELTA_RULES[kind]
            kernels[kind] = torch.compiler.disable(_delta_rule(getattr(import_compiled(module, function), function)))
    except PackageProblem as problem:
        raise args.error("mamba_backend", f"fla needs {problem}; or set mamba_backend: torch") from None
    _say(log, "fla", "fla for delta rules; their convolution and generation use torch")
    return replace(
        scans, package="fla", gated_delta=kernels.get(GatedDeltaNetSpec), kimi_delta=kernels.get(KimiDeltaAttentionSpec)
    )


def _convolves(specs: Sequence[MambaSpec | Mamba2Spec], tensor: int) -> bool:
    """Whether causal-conv1d supports the convolutions of these mixers.

    They must span 2 to 4 tokens, and the number of channels of a tensor rank must be a multiple of 8.

    tensor: number of tensor ranks.
    """
    channels = [spec.inner + (2 * spec.groups * spec.state if isinstance(spec, Mamba2Spec) else 0) for spec in specs]
    return all(2 <= spec.conv_kernel <= 4 for spec in specs) and all(count // tensor % 8 == 0 for count in channels)


def _say(log: Callable[[str], None] | None, requested: str, chosen: str) -> None:
    if log is not None:
        log(f"mamba_backend: {'auto chose ' if requested == 'auto' else ''}{chosen}")


def _kernels_of_package(name: str, kinds: set[type], convolves: bool) -> ScanKernels:
    # torch's compiler cannot trace these kernels, so compiled code calls them between its graphs.
    convolution = None
    try:
        if convolves:
            convolution = torch.compiler.disable(_convolution(getattr(import_compiled(*_CONVOLUTION), _CONVOLUTION[1])))
    except PackageProblem:
        pass  # torch's convolution is used, as the log line says
    if name == "fla":
        gla = getattr(import_compiled(*_GLA), _GLA[1])
        return ScanKernels(name, chunked=torch.compiler.disable(_linear_attention(gla)), convolution=convolution)
    selective = chunked = None
    if MambaSpec in kinds:
        selective = torch.compiler.disable(_selective(getattr(import_compiled(*_SELECTIVE), _SELECTIVE[1])))
    if Mamba2Spec in kinds:
        chunked = torch.compiler.disable(_chunked(getattr(import_compiled(*_CHUNKED), _CHUNKED[1])))
    return ScanKernels(name, selective, chunked, convolution)


def _selective(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        x: Tensor, dt: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor
    ) -> Tensor:  # fmt: skip
        rows = [tensor.permute(1, 2, 0) for tensor in (x, dt.to(x.dtype), b, c, z)]
        out = scan(*rows[:2], a, *rows[2:4], D=d.float(), z=rows[4], delta_bias=bias.float(), delta_softplus=True)
        return out.permute(2, 0, 1)

    return run


def _chunked(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        x: Tensor, dt: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, spec: Mamba2Spec,
        inputs: StateInputs,
    ) -> Tensor:  # fmt: skip
        rows = [tensor.transpose(0, 1) for tensor in (x, dt, b, c)]
        documents = None if inputs.documents is None else inputs.documents.t().contiguous()
        out = scan(
            *rows[:2], a, *rows[2:], chunk_size=spec.chunk, D=d.float(), dt_bias=bias.float(), seq_idx=documents,
            dt_softplus=True, dt_limit=spec.time_step_limit,
        )  # fmt: skip
        return out.transpose(0, 1)

    return run


def _linear_attention(attend: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Tensor]:
    """Returns a function that computes Mamba 2's scan by `attend`, flash-linear-attention with a decay for
    each head.

    Queries are C, keys B, and values dt x.
    """

    def run(
        x: Tensor, dt: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, spec: Mamba2Spec,
        inputs: StateInputs,
    ) -> Tensor:  # fmt: skip
        steps = torch.nn.functional.softplus(dt.float() + bias.float()).clamp(*spec.time_step_limit)
        q, k = (tensor.repeat_interleave(x.shape[2] // tensor.shape[2], 2) for tensor in (c, b))
        values = (x.float() * steps.unsqueeze(3)).to(x.dtype)
        rows = [tensor.transpose(0, 1) for tensor in (q, k, values, steps * a)]
        shape, ends = rows[2].shape, inputs.cu_seqlens
        if ends is not None:  # `attend` needs all documents in one row
            rows = [tensor.flatten(0, 1).unsqueeze(0) for tensor in rows]
        out, _ = attend(*rows, scale=1.0, cu_seqlens=None if ends is None else ends.unique().long())
        return out.view(shape).transpose(0, 1) + x * d.to(x.dtype).unsqueeze(1)

    return run


def _delta_rule(rule: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Tensor]:
    """Returns a function that computes a delta rule by fla's `rule`, on values in their type."""

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, inputs: StateInputs) -> Tensor:
        rows = [tensor.transpose(0, 1) for tensor in (q.to(v.dtype), k.to(v.dtype), v, log_decay, rate.to(v.dtype))]
        shape, ends = rows[2].shape, inputs.cu_seqlens
        if ends is not None:  # `rule` needs all documents in one row
            rows = [tensor.flatten(0, 1).unsqueeze(0) for tensor in rows]
        out, _ = rule(*rows, scale=1.0, cu_seqlens=None if ends is None else ends.unique().long())
        return out.view(shape).transpose(0, 1).float()

    return run


def _convolution(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: StateInputs) -> Tensor:
        documents = None if inputs.documents is None else inputs.documents.t().contiguous()
        # causal-conv1d needs channels as the innermost dimension to support documents.
        rows = x.transpose(0, 1).contiguous().transpose(1, 2)
        out = convolve(rows, weight.squeeze(1), bias, seq_idx=documents, activation="silu")
        return out.permute(2, 0, 1)

    return run
