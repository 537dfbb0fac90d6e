"""Self-attention: its inputs and masks, the kernels behind one function, and the layer around it."""

from megatron.model.attention.backends import Backend, attend, choose_backend, has_varlen_kernel, takes_varlen
from megatron.model.attention.inputs import (
    AttentionInputs,
    branch_inputs,
    cached_inputs,
    has_bias,
    sliding_window,
    text_inputs,
)
from megatron.model.attention.layer import SelfAttention
from megatron.model.attention.masks import document_mask, window_mask

__all__ = [
    "AttentionInputs",
    "Backend",
    "SelfAttention",
    "attend",
    "branch_inputs",
    "cached_inputs",
    "choose_backend",
    "document_mask",
    "has_bias",
    "has_varlen_kernel",
    "sliding_window",
    "takes_varlen",
    "text_inputs",
    "window_mask",
]
