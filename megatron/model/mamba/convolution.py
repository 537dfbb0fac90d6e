"""The causal convolution before a scan: each channel by itself, over the last few tokens."""

import torch
from torch import Tensor

from megatron.model.mamba.inputs import StateInputs


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """`[seq, batch, channels]` to the same: at t the sum over i of weight[k - 1 - i] x[t - i], and the bias.

    weight: `[channels, 1, k]`. documents: as of `StateInputs`: what is before a document counts as zeros.
    before: `[k - 1, batch, channels]`, the inputs before the first; None: zeros. Products are summed in fp32.
    """
    seq, width = x.shape[0], weight.shape[-1]
    before = x.new_zeros(width - 1, *x.shape[1:]) if before is None else before.to(x.dtype)
    longer = torch.cat([before, x])
    if seq == 1 and documents is None:
        total = (longer.float() * weight.float().permute(2, 1, 0)).sum(0, keepdim=True)
        return (total if bias is None else total + bias.float()).to(x.dtype)
    taps = weight.float().squeeze(1).unbind(1)
    total = x.float() * taps[-1]
    for i in range(1, width):
        earlier = longer[width - 1 - i : width - 1 - i + seq].float()
        if documents is not None:
            # No document's number is 0, so that what is before the first is another's.
            known = torch.cat([documents.new_zeros(i, documents.shape[1]), documents])[:seq] == documents
            earlier = earlier * known.unsqueeze(2)
        total = total + earlier * taps[-1 - i]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def last_inputs(x: Tensor, width: int, inputs: StateInputs, before: Tensor | None) -> Tensor:
    """The last `width` inputs of each row, `[width, batch, channels]`, for the tokens that come. before: as
    of `causal_convolution`, of `width`."""
    before = x.new_zeros(width, *x.shape[1:]) if before is None else before.to(x.dtype)
    longer = torch.cat([before, x])
    if inputs.filled is None:
        return longer[longer.shape[0] - width :]
    places = inputs.filled.sum(0) + torch.arange(width, device=x.device).unsqueeze(1)
    return longer.gather(0, places.unsqueeze(2).expand(-1, -1, x.shape[2]))
