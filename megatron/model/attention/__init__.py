"""Self-attention: its inputs and masks, the kernels behind one function, and the layer around it."""

from megatron.model.attention.backends import Backend, attend, choose_backend, has_varlen_kernel, takes_varlen
from megatron.model.attention.inputs import AttentionInputs, LayerKind, has_bias, layer_kind, sliding_window
from megatron.model.attention.layer import SelfAttention
from megatron.model.attention.masks import document_mask, window_mask

__all__ = [
    "AttentionInputs",
    "Backend",
    "LayerKind",
    "SelfAttention",
    "attend",
    "choose_backend",
    "document_mask",
    "has_bias",
    "has_varlen_kernel",
    "layer_kind",
    "sliding_window",
    "takes_varlen",
    "window_mask",
]
