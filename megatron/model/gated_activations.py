"""Gated activations that are not of the form act(gate) * up."""

import torch
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate), with gate <= `limit` and |up| <= `limit` (clamped).

    It is gpt-oss's activation (`GptOssExperts._apply_gate` of transformers, `swigluoai` of vLLM). gate and up
    have the same shape and dtype, and so does the result.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))
