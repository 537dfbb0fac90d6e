"""Self-attention: its inputs and masks, the kernels behind one function, and the layer around it."""

from megatron.model.attention.backends import Options
from megatron.model.attention.choice import Backends, choose_backends
from megatron.model.attention.inputs import AttentionInputs, LayerKind, has_bias, layer_kind, sliding_window
from megatron.model.attention.layer import SelfAttention
from megatron.model.attention.masks import document_mask, window_mask

__all__ = [
    "AttentionInputs",
    "Backends",
    "LayerKind",
    "Options",
    "SelfAttention",
    "choose_backends",
    "document_mask",
    "has_bias",
    "layer_kind",
    "sliding_window",
    "window_mask",
]
