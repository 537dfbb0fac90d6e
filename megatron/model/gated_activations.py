"""Gated activations that are no function of the gate times `up`."""

import torch
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's swiglu (`GptOssExperts._apply_gate` of transformers, `swigluoai` of vLLM):
    (up + 1) * gate * sigmoid(alpha * gate), of gates of at most `limit` and ups within +- `limit`.

    gate, up: of one shape and dtype, those of the result.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))
