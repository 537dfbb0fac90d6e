"""Self-attention: its inputs and masks, the kernels behind one function, and the layer around it."""

from megatron.model.attention.backend_choice import AttentionBackends, choose_backends
from megatron.model.attention.backends import AttentionOptions
from megatron.model.attention.inputs import AttentionInputs, cached_inputs, text_inputs, tree_inputs
from megatron.model.attention.layer import SelfAttention
from megatron.model.attention.masks import document_mask, window_mask
