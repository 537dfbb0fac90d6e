"""NEFTune: uniform noise on the embeddings in fine-tuning (arXiv 2310.05914)."""

import torch
from torch import Tensor

from megatron.mpu import fork_seed, mix_seed


def document_lengths(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The number of tokens of the document that each token belongs to, `[batch, seq]` fp32.

    tokens: `[batch, seq]`. cu_seqlens: as of `Documents`; None: each row is one document.
    """
    (rows, seq), device = tokens.shape, tokens.device
    if cu_seqlens is None:
        return torch.full((rows, seq), float(seq), device=device)
    places = torch.arange(rows * seq, dtype=cu_seqlens.dtype, device=device)
    document = torch.searchsorted(cu_seqlens, places, right=True) - 1
    return cu_seqlens.diff()[document].float().view(rows, seq)


def add_noise(x: Tensor, lengths: Tensor, alpha: float, seed: int, part: int = 0, parts: int = 1) -> Tensor:
    """Returns `x` plus noise: U(-1, 1) * alpha / sqrt(L * hidden), with L the token's entry in `lengths`.

    x: `[seq/parts, batch, hidden]`, part number `part` of `parts` equal parts of the sequence. lengths:
    `[batch, seq]`. The noise of the full sequence is a function of `seed` alone.
    """
    rows, seq = lengths.shape
    shape = seq, rows, x.shape[-1]
    with fork_seed(mix_seed(seed, "neftune"), x.device):
        noise = torch.empty(shape, dtype=torch.float32, device=x.device).uniform_(-1.0, 1.0).chunk(parts)[part]
    size = (alpha / (lengths * x.shape[-1]).sqrt()).t().chunk(parts)[part]
    return x + (noise * size.unsqueeze(-1)).to(x.dtype)
