"""The causal convolution before Mamba's scan: each channel is convolved separately, over the last few
tokens."""

import torch
from torch import Tensor

from megatron.model.mamba.inputs import StateInputs


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None = None, history: Tensor | None = None
) -> Tensor:
    """Returns the causal convolution of each channel, `[seq, batch, channels]`. Products are summed in fp32.

    At t it is the sum over i of weight[k - 1 - i] x[t - i], plus bias.

    x: shaped as the result.
    weight: `[channels, 1, k]`.
    documents: `[seq, batch]`, the number of each token's document; inputs before a document's first token
        count as zeros. None: each row is one text.
    history: `[k - 1, batch, channels]`, the inputs before x; None: zeros.
    """
    seq, width = x.shape[0], weight.shape[-1]
    history = x.new_zeros(width - 1, *x.shape[1:]) if history is None else history.to(x.dtype)
    longer = torch.cat([history, x])
    if seq == 1 and documents is None:
        total = (longer.float() * weight.float().permute(2, 1, 0)).sum(0, keepdim=True)
        return (total if bias is None else total + bias.float()).to(x.dtype)
    taps = weight.float().squeeze(1).unbind(1)
    total = x.float() * taps[-1]
    for i in range(1, width):
        earlier = longer[width - 1 - i : width - 1 - i + seq].float()
        if documents is not None:
            # Documents are counted from 1, so the padding with 0 before the first token is another document.
            same_document = torch.cat([documents.new_zeros(i, documents.shape[1]), documents])[:seq] == documents
            earlier = earlier * same_document.unsqueeze(2)
        total = total + earlier * taps[-1 - i]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def last_inputs(x: Tensor, width: int, inputs: StateInputs, history: Tensor | None) -> Tensor:
    """Returns the last `width` inputs of each row, `[width, batch, channels]`, to be the `history` of the
    next call.

    inputs: `inputs.filled` says which tokens are not padding.
    history: `[width, batch, channels]`, the inputs before x; None: zeros.
    """
    history = x.new_zeros(width, *x.shape[1:]) if history is None else history.to(x.dtype)
    longer = torch.cat([history, x])
    if inputs.filled is None:
        return longer[longer.shape[0] - width :]
    places = inputs.filled.sum(0) + torch.arange(width, device=x.device).unsqueeze(1)
    return longer.gather(0, places.unsqueeze(2).expand(-1, -1, x.shape[2]))
