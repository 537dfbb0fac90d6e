"""The first layer: token embeddings, the absolute positions that are added to them, and NEFTune's noise."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.model.attention.masks import document_ids
from megatron.model.positions import sinusoidal_embedding
from megatron.model.specs import EmbeddingSpec, HeadSpec
from megatron.mpu import (
    ContextRank,
    ParallelGroups,
    ParamSpec,
    VocabParallelEmbedding,
    allocate,
    dropout,
    fork_seed,
    mix_seed,
    scatter_to_sequence,
    seed_tensor,
)


def word_embeddings(spec: EmbeddingSpec | HeadSpec) -> ParamSpec:
    """Returns the spec of the embedding's weight `[vocab, hidden]`, which a tied head shares.

    Raises ValueError if the padded vocabulary size is not known yet.
    """
    if spec.vocab is None:
        raise ValueError("padded_vocab_size is not set yet: build the tokenizer first, which determines it")
    shape, blocks = (spec.vocab, spec.hidden), (spec.vocab,)
    copied_to_end = isinstance(spec, EmbeddingSpec) and spec.on_last_stage
    return ParamSpec(
        "word_embeddings.weight", shape, 0, blocks, "embedding", weight_decay=True, tied=spec.tied or copied_to_end
    )


def copied(weight: ParamSpec) -> ParamSpec:
    """Returns the spec of a copy of `weight`, which is trained instead of it while adapters are trained
    (`lora.modules_to_save`)."""
    return replace(weight, name=weight.name.replace(".weight", ".modules_to_save"))


def document_lengths(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the number of tokens in each token's document, `[batch, seq]` fp32.

    tokens: `[batch, seq]`.
    cu_seqlens: `[n]` int32, starts of documents in the flattened batch, then its end; None: each row is one
        document.
    """
    (rows, seq), device = tokens.shape, tokens.device
    if cu_seqlens is None:
        return torch.full((rows, seq), float(seq), device=device)
    return cu_seqlens.diff()[document_ids(cu_seqlens, rows, seq) - 1].float()


def add_noise(
    x: Tensor,
    lengths: Tensor,
    alpha: float,
    seed: int,
    part: int = 0,
    parts: int = 1,
    context: ContextRank | None = None,
) -> Tensor:
    """Returns `x` plus NEFTune's noise (arXiv 2310.05914): uniform in [-1, 1] times alpha / sqrt(length *
    hidden).

    The noise of the full sequence is a function of `seed` alone.

    x: `[places/parts, batch, hidden]`, part number `part` of `parts` equal parts of the sequence, or of the
        columns of this context rank.
    lengths: `[batch, seq]`, the length to use for each token of full rows.
    """
    rows, seq = lengths.shape
    shape = seq, rows, x.shape[-1]
    with fork_seed(mix_seed(seed, "neftune"), x.device):
        noise = torch.empty(shape, dtype=torch.float32, device=x.device).uniform_(-1.0, 1.0)
    size = (alpha / (lengths * x.shape[-1]).sqrt()).t()
    noise, size = (v if context is None else context.local(v) for v in (noise, size))
    noise, size = noise.chunk(parts)[part], size.chunk(parts)[part]
    return x + (noise * size.unsqueeze(-1)).to(x.dtype)


class Embedding(nn.Module):
    """Turns tokens into hidden states, with learned or sinusoidal positions, NEFTune's noise and dropout."""

    def __init__(self, spec: EmbeddingSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        words, positions = self.words(spec), self.positions(spec)
        self.word_embeddings = VocabParallelEmbedding(words, groups, sequence_parallel)
        self.group = groups.group("tensor")
        self.sequence_parallel = sequence_parallel
        self.multiplier, self.sinusoidal, self.position_offset = spec.multiplier, spec.sinusoidal, spec.offset
        self.position_embeddings = nn.Module() if positions else None
        if self.position_embeddings is not None:
            allocate(self.position_embeddings, positions, groups)
        self.dropout, self.noise = spec.dropout, spec.noise
        self.part, self.parts = (groups.rank("tensor"), groups.size("tensor")) if sequence_parallel else (0, 1)
        self.seed_offset = groups.rank("context") * self.parts + self.part  # of dropout: ranks have other tokens

    @staticmethod
    def words(spec: EmbeddingSpec) -> tuple[ParamSpec, ...]:
        weight = word_embeddings(spec)
        return (weight, copied(weight)) if spec.copied else (weight,)

    @staticmethod
    def positions(spec: EmbeddingSpec) -> tuple[ParamSpec, ...]:
        name, shape = "position_embeddings.weight", (spec.learned, spec.hidden)
        weight = ParamSpec(name, shape, init="embedding", weight_decay=True, tied=spec.on_last_stage)
        return (weight,) if spec.learned else ()

    @classmethod
    def params(cls, spec: EmbeddingSpec) -> tuple[ParamSpec, ...]:
        return (*cls.words(spec), *cls.positions(spec))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        seed: int,
        cu_seqlens: Tensor | None = None,
        context: ContextRank | None = None,
    ) -> Tensor:
        """Returns hidden states `[seq, batch, hidden]` (`[seq/T, ..]` under sequence parallelism).

        tokens: `[batch, seq]`, full rows. positions: of the columns that this context rank computes.
        seed: of noise and dropout.
        cu_seqlens: `[n]` int32, starts of documents in the flattened batch, then its end; None: each row is
            one document.
        context: the columns that this context rank computes, and the only ones of the result; None: all.
        """
        x = self.word_embeddings(tokens.t() if context is None else context.local(tokens.t()))
        sequence_group = self.group if self.sequence_parallel else None
        if self.multiplier != 1.0:
            x = x * torch.tensor(self.multiplier, dtype=x.dtype)
        if self.noise and self.training:
            lengths = document_lengths(tokens, cu_seqlens)
            x = add_noise(x, lengths, self.noise, seed, self.part, self.parts, context)
        if self.position_embeddings is not None:
            rows = positions.t() + self.position_offset
            added = nn.functional.embedding(rows, self.position_embeddings.weight)  # type: ignore[arg-type]
            x = x + scatter_to_sequence(added, sequence_group)
        if self.sinusoidal:
            added = sinusoidal_embedding(positions.t(), x.shape[-1]).to(x.dtype)
            x = x + scatter_to_sequence(added, sequence_group)
        return dropout(x, self.dropout, seed_tensor(seed + self.seed_offset), self.training)
