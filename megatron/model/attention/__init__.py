"""Self-attention: its inputs and masks, the kernels behind one function, and the layer around it."""

from megatron.model.attention.backends import Options
from megatron.model.attention.choice import Backends, choose_backends
from megatron.model.attention.inputs import AttentionInputs, branch_inputs, cached_inputs, text_inputs
from megatron.model.attention.layer import SelfAttention
from megatron.model.attention.masks import document_mask, window_mask

__all__ = [
    "AttentionInputs",
    "Backends",
    "Options",
    "SelfAttention",
    "branch_inputs",
    "cached_inputs",
    "choose_backends",
    "document_mask",
    "text_inputs",
    "window_mask",
]
