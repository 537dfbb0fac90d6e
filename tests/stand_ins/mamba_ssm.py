"""Stand-ins for mamba_ssm, causal-conv1d and flash-linear-attention, by the docstrings of their
selective_scan_interface.py, ssd_combined.py, causal_conv1d_interface.py, and chunk.py of simple_gla,
gated_delta_rule and kda, in fp32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.stand_ins.signatures import bind


def modules() -> dict[str, dict[str, Any]]:
    return {
        "mamba_ssm": {}, "mamba_ssm.ops": {},
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": selective_scan_fn}, "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    }  # fmt: skip


def convolution_modules() -> dict[str, dict[str, Any]]:
    return {"causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn}}


def fla_modules() -> dict[str, dict[str, Any]]:
    return {
        "fla": {}, "fla.ops": {}, "fla.ops.simple_gla": {"chunk_simple_gla": chunk_simple_gla},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "fla.ops.kda": {"chunk_kda": chunk_kda},
    }  # fmt: skip


def selective_scan_fn(*args: Any, **kwargs: Any) -> Tensor:
    call = bind("mamba_ssm", "selective_scan_fn", args, kwargs)
    u, delta, a, b, c = (call[name] for name in ("u", "delta", "A", "B", "C"))
    assert u.dtype == delta.dtype == b.dtype == c.dtype and a.dtype == torch.float32 == call["delta_bias"].dtype
    assert u.shape == delta.shape == call["z"].shape and b.shape == (u.shape[0], a.shape[1], u.shape[2])
    assert a.shape[1] <= 256, "selective_scan only supports state dimension <= 256"
    assert call["delta_softplus"] and not call["return_last_state"]
    steps = F.softplus(delta.float() + call["delta_bias"][:, None])
    state, outputs = u.new_zeros(*u.shape[:2], a.shape[1]).float(), []
    for t in range(u.shape[2]):
        added = (steps[..., t] * u[..., t].float()).unsqueeze(2) * b[:, None, :, t].float()
        state = torch.exp(steps[..., t, None] * a) * state + added
        outputs.append((state * c[:, None, :, t].float()).sum(2))
    out = torch.stack(outputs, 2) + call["D"][:, None] * u.float()
    return (out * F.silu(call["z"].float())).to(u.dtype)


def mamba_chunk_scan_combined(*args: Any, **kwargs: Any) -> Tensor:
    call = bind("mamba_ssm", "mamba_chunk_scan_combined", args, kwargs)
    x, dt, a, b, c = (call[name] for name in ("x", "dt", "A", "B", "C"))
    assert x.dim() == 4 and dt.shape == x.shape[:3] and a.shape == (x.shape[2],) and b.shape == c.shape
    assert call["dt_softplus"] and call["z"] is call["initial_states"] is None and x.shape[2] % b.shape[2] == 0
    steps = F.softplus(dt.float() + call["dt_bias"]).clamp(*call["dt_limit"])
    documents = call["seq_idx"]
    assert documents is None or (documents.dtype == torch.int32 and documents.shape == x.shape[:2])
    q, k = (tensor.float().repeat_interleave(x.shape[2] // b.shape[2], 2) for tensor in (c, b))
    out = _recurrence(q, k, x.float() * steps.unsqueeze(3), steps * a, documents)
    return (out + call["D"][:, None] * x.float()).to(x.dtype)


def chunk_simple_gla(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    call = bind("fla", "chunk_simple_gla", args, kwargs)
    q, k, v, g, starts = (call[name] for name in ("q", "k", "v", "g", "cu_seqlens"))
    documents = _documents(q, starts)
    assert call["scale"] == 1.0 and call["initial_state"] is None
    return _recurrence(q.float(), k.float(), v.float(), g, documents).to(q.dtype), None


def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    call = bind("fla", "chunk_gated_delta_rule", args, kwargs)
    assert call["g"].shape == call["beta"].shape == call["v"].shape[:3]
    return _delta_rule({**call, "g": call["g"].unsqueeze(3)}), None


def chunk_kda(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    call = bind("fla", "chunk_kda", args, kwargs)
    assert call["beta"].shape == call["v"].shape[:3] and call["g"].shape == (*call["v"].shape[:3], call["q"].shape[3])
    assert not call["use_gate_in_kernel"] and call["q"].shape[3] <= 256
    return _delta_rule(call), None


def _delta_rule(call: dict[str, Any]) -> Tensor:
    """Runs the delta rule by its formula; `[batch, seq, heads, value_dim]`, in the type of q."""
    q, k, v, g, beta = (call[name] for name in ("q", "k", "v", "g", "beta"))
    assert q.shape == k.shape and q.dtype == k.dtype == v.dtype and v.shape[2] % q.shape[2] == 0
    assert call["scale"] == 1.0 and call["initial_state"] is None and not call["kwargs"]
    assert not (call["use_qk_l2norm_in_kernel"] or call["use_beta_sigmoid_in_kernel"])
    documents, share = _documents(q, call["cu_seqlens"]), v.shape[2] // q.shape[2]
    queries, keys = (x.float().repeat_interleave(share, 2).unsqueeze(4) for x in (q, k))
    state, outputs = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]).float(), []
    for t in range(q.shape[1]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1]).view(-1, 1, 1, 1)
        state = state * g[:, t].float().exp().unsqueeze(3)
        error = v[:, t].float() - (state * keys[:, t]).sum(2)
        state = state + keys[:, t] * (error * beta[:, t].float().unsqueeze(2)).unsqueeze(2)
        outputs.append((state * queries[:, t]).sum(2))
    return torch.stack(outputs, 1).to(q.dtype)


def _documents(q: Tensor, starts: Tensor | None) -> Tensor | None:
    """The number of each token's document, from `cu_seqlens`."""
    if starts is None:
        return None
    assert q.shape[0] == 1 and starts[0] == 0 and starts[-1] == q.shape[1] and starts.dtype == torch.int64
    return torch.bucketize(torch.arange(q.shape[1]), starts, right=True).unsqueeze(0)


def _recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, documents: Tensor | None) -> Tensor:
    """o_t = q_t S_t, S_t = exp(decay_t) S_{t-1} + k_t v_t', `[batch, seq, heads, ..]`."""
    state, outputs = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1]).view(-1, 1, 1, 1)
        state = torch.exp(decay[:, t]).unsqueeze(2).unsqueeze(3) * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t].unsqueeze(3) * state).sum(2))
    return torch.stack(outputs, 1)


def causal_conv1d_fn(*args: Any, **kwargs: Any) -> Tensor:
    call = bind("causal_conv1d", "causal_conv1d_fn", args, kwargs)
    x, weight, documents = call["x"], call["weight"], call["seq_idx"]
    assert x.stride(1) == 1 or documents is None, "only channel-last layout has seq_idx"
    assert 2 <= weight.shape[1] <= 4, "causal_conv1d only supports width between 2 and 4"
    assert x.stride(1) != 1 or (x.stride(0) % 8 == 0 and x.stride(2) % 8 == 0), "strides in multiples of 8"
    assert call["activation"] == "silu" and call["initial_states"] is None and weight.shape[0] == x.shape[1]
    width, length = weight.shape[1], x.shape[2]
    out = torch.zeros_like(x).float()
    for i in range(width):
        earlier = F.pad(x, (i, 0))[..., :length].float()
        if documents is not None:
            earlier = earlier * (F.pad(documents, (i, 0), value=-1)[:, :length] == documents).unsqueeze(1)
        out = out + earlier * weight[:, width - 1 - i, None].float()
    out = out if call["bias"] is None else out + call["bias"][:, None].float()
    return F.silu(out).to(x.dtype)
