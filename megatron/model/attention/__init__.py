"""Self-attention: the layer, its inputs and masks, and the backends (kernels) that compute it.

A backend is chosen for each kind of call, such as with a mask, over documents, or from a cache.
"""

from megatron.model.attention.backend_choice import AttentionBackends, choose_backends
from megatron.model.attention.backends import AttentionOptions
from megatron.model.attention.head_attention import HeadAttention
from megatron.model.attention.inputs import AttentionInputs, HeadsOrder, cached_inputs, text_inputs, tree_inputs
from megatron.model.attention.latent import LatentAttention
from megatron.model.attention.layer import SelfAttention
from megatron.model.attention.masks import document_mask, window_mask
