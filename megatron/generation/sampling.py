"""Chooses the next token of each row from logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from megatron.neox_arguments import NeoXArgs

_CANDIDATES = 512  # on a CPU, top-p first sorts only so many most likely tokens, because sorting all is slow


@dataclass(frozen=True)
class SamplingParams:
    """The parameters for choosing the next token, named as in vLLM and transformers.

    temperature: divides the logits; 0: the most likely token is chosen.
    top_k, top_p, min_p: as in `filter_logits`; 0: no filter.
    logit_bias: (token id, bias) pairs; before all else, each bias is added to the token's logit (OpenAI).
    repetition_penalty: divides positive logits and multiplies negative logits of tokens that occur in the
        prompt or the generated text (arXiv 1909.05858, transformers); 1: no penalty.
    frequency_penalty: subtracted from a token's logit for each time the token occurs in the generated text
        (OpenAI).
    presence_penalty: subtracted once from a token's logit if the token occurs in the generated text (OpenAI).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def from_args(args: NeoXArgs) -> SamplingParams:
        """Returns the sampling parameters that a configuration sets."""
        return SamplingParams(
            args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.frequency_penalty,
            args.presence_penalty,
        )  # fmt: skip

    @property
    def penalised(self) -> bool:
        """Whether a repetition, frequency or presence penalty is set."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def filter_logits(
    logits: Tensor, top_k: Sequence[int] = (), top_p: Sequence[float] = (), min_p: Sequence[float] = ()
) -> Tensor:
    """Returns logits `[rows, vocab]` in which tokens that must not be chosen have -inf.

    Filters apply in GPT-NeoX's order: top-k, top-p of the remaining tokens, min-p. Each filter has one value
    per row; an empty sequence turns the filter off.

    top_k keeps the k largest logits. top_p keeps the most likely tokens, just enough for their probabilities
    to sum to top_p (nucleus sampling, arXiv 1904.09751). min_p drops tokens whose probability is below min_p
    times that of the most likely token (arXiv 2407.01082). Tokens that are as likely as the least likely
    token kept are kept too, so that the result of a row depends only on its own values.
    """
    vocab, device = logits.shape[-1], logits.device
    threshold = torch.full((len(logits), 1), float("-inf"), dtype=logits.dtype, device=device)
    if any(0 < k < vocab for k in top_k):
        k = torch.tensor([min(k, vocab) if k > 0 else vocab for k in top_k], device=device).unsqueeze(1)
        wide = max(k for k in top_k if k < vocab)
        kth = logits.topk(wide).values.gather(1, (k - 1).clamp(max=wide - 1))
        threshold = torch.where(k < vocab, kth, threshold)
    if any(0.0 < p < 1.0 for p in top_p):
        p = torch.tensor([p if 0.0 < p < 1.0 else 2.0 for p in top_p], dtype=logits.dtype, device=device).unsqueeze(1)
        threshold = torch.maximum(threshold, _nucleus(logits.masked_fill(logits < threshold, float("-inf")), p))
    if any(m > 0.0 for m in min_p):
        m = torch.tensor(min_p, dtype=logits.dtype, device=device).unsqueeze(1)
        threshold = torch.maximum(threshold, logits.amax(-1, keepdim=True) + m.log())
    return logits.masked_fill(logits < threshold, float("-inf"))


def _nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Returns the smallest logit that top-p keeps in each row, `[rows, 1]`; -inf for rows whose top_p is
    above 1, which means no filter.

    top_p: `[rows, 1]`.
    """
    total, vocab = logits.logsumexp(-1, keepdim=True), logits.shape[-1]
    width = vocab if logits.is_cuda else min(_CANDIDATES, vocab)
    while True:
        ordered = logits.topk(width).values if width < vocab else logits.sort(descending=True).values
        probabilities = (ordered - total).exp()
        reached = probabilities.cumsum(-1)
        if width == vocab or bool(((reached[:, -1:] >= top_p) | (top_p > 1.0)).all()):
            break
        width = vocab
    num_retained = (reached - probabilities <= top_p).sum(-1, keepdim=True)
    return torch.where(top_p > 1.0, float("-inf"), ordered.gather(1, num_retained - 1))


class TokenSampler:
    """Chooses a token for each row of a batch. Rows may have different sampling parameters.

    It counts the tokens of each row for the penalties, so it can be used only as long as the batch has the
    same rows.
    """

    def __init__(
        self,
        samplings: Sequence[SamplingParams],
        texts: Sequence[tuple[int, Sequence[int]]],
        vocab: int,
        device: torch.device,
        minimums: Sequence[tuple[int, Collection[int]]] = (),
    ) -> None:
        """Copies the sampling parameters of all rows to the device.

        samplings: the parameters of each row.
        texts: (prompt length, all tokens so far) of each row.
        vocab: size of the vocabulary without padding.
        minimums: (number of generated tokens before which stop tokens are forbidden, stop tokens) of each
            row; empty: no minimum.
        """
        self.device, self.vocab = device, vocab
        biases = [(row, *bias) for row, sampling in enumerate(samplings) for bias in sampling.logit_bias]
        self.biased = self._flat([[row for row, _, _ in biases]]), self._flat([[token for _, token, _ in biases]])
        self.bias = self._tensor([float(value) for _, _, value in biases]) if biases else None
        pairs = zip(minimums, texts, strict=True) if minimums else ()
        self.minimums_left = [(minimum - len(tokens) + start, ends) for (minimum, ends), (start, tokens) in pairs]
        self.banned = self._stop_tokens_too_early()
        sampled = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0.0]
        self.sampled_rows = sampled  # other rows take the most likely token
        self.all_sampled = len(sampled) == len(samplings)
        self.rows = self._tensor(sampled)
        params = [samplings[i] for i in sampled]
        self.temperature = self._tensor([sampling.temperature for sampling in params]).unsqueeze(1)
        self.filters = (
            [sampling.top_k for sampling in params],
            [sampling.top_p for sampling in params],
            [sampling.min_p for sampling in params],
        )
        self.penalised = [i for i, sampling in enumerate(samplings) if sampling.penalised]
        if self.penalised:
            penalised = [(samplings[i], *texts[i]) for i in self.penalised]
            self.penalised_rows = self._tensor(self.penalised)
            self.repetition, self.frequency, self.presence = (
                self._tensor([getattr(sampling, name) for sampling, _, _ in penalised]).unsqueeze(1)
                for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
            )
            self.is_present = torch.zeros(len(penalised), vocab, dtype=torch.bool, device=device)
            self.counts = torch.zeros(len(penalised), vocab, device=device)
            places = [[i] * len(tokens) for i, (_, _, tokens) in enumerate(penalised)]
            rows, ids = self._flat(places), self._flat([tokens for _, _, tokens in penalised])
            self.is_present[rows, ids] = True
            rows = self._flat([place[start:] for place, (_, start, _) in zip(places, penalised, strict=True)])
            ids = self._flat([tokens[start:] for _, start, tokens in penalised])
            self.counts.index_put_((rows, ids), torch.ones(len(ids), device=device), accumulate=True)

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _flat(self, values: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(list(chain.from_iterable(values)), dtype=torch.long, device=self.device)

    def sample(self, logits: Tensor, uniforms: Sequence[float]) -> Tensor:
        """Returns the next token id of each row, `[rows]` int64; -1 for rows whose logits are NaN.

        logits: fp32 `[rows, vocab]`, without padding of the vocabulary. uniforms: a random number in [0, 1)
            for each row with temperature above 0 (`sampled_rows`).
        """
        if self.bias is not None:
            logits = logits.index_put(self.biased, self.bias, accumulate=True)
        if self.penalised:
            logits = self._penalise(logits)
        if self.banned is not None:
            logits = logits.index_put(self.banned, logits.new_tensor(float("-inf")))
        if not self.sampled_rows:
            return _most_likely(logits)
        sampled = logits if self.all_sampled else logits[self.rows]
        filtered = filter_logits(sampled / self.temperature, *self.filters)
        total = filtered.softmax(-1, dtype=torch.float64).cumsum(-1)
        draws = torch.tensor(uniforms, dtype=torch.float64, device=self.device).unsqueeze(1) * total[:, -1:]
        tokens = torch.searchsorted(total, draws, right=True).squeeze(-1)
        tokens = tokens.masked_fill(total[:, -1].isnan(), -1)
        return tokens if self.all_sampled else _most_likely(logits).index_copy(0, self.rows, tokens)

    def _stop_tokens_too_early(self) -> tuple[Tensor, Tensor] | None:
        """Returns the stop tokens that rows may not choose yet, because their texts are still too short.

        They are n pairs of row and token id, as two tensors `[n]`: (rows, ids). Returns None if there are
        none.
        """
        pairs = [
            (row, token)
            for row, (left, ends) in enumerate(self.minimums_left) if left > 0
            for token in ends if 0 <= token < self.vocab
        ]  # fmt: skip
        if not pairs:
            return None
        rows, ids = torch.tensor(pairs, device=self.device).unbind(1)
        return rows, ids

    def _penalise(self, logits: Tensor) -> Tensor:
        penalised = logits[self.penalised_rows]
        scaled = torch.where(penalised > 0, penalised / self.repetition, penalised * self.repetition)
        penalised = torch.where(self.is_present, scaled, penalised)
        penalised = penalised - self.counts * self.frequency - (self.counts > 0) * self.presence
        return logits.index_copy(0, self.penalised_rows, penalised)

    def update(self, tokens: Tensor) -> None:
        """Records the tokens that were chosen for the rows, `[rows]` int64, for penalties and minimum lengths
        in later steps."""
        if self.banned is not None:
            self.minimums_left = [(left - 1, ends) for left, ends in self.minimums_left]
            if any(left == 0 for left, _ in self.minimums_left):
                self.banned = self._stop_tokens_too_early()
        if self.penalised:
            ids = tokens.to(self.device)[self.penalised_rows].unsqueeze(1)
            self.is_present.scatter_(1, ids, True)
            self.counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=self.counts.dtype))


def _most_likely(logits: Tensor) -> Tensor:
    """Returns the id of the largest logit of each row, -1 for a row that holds NaN."""
    best, ids = logits.max(-1)  # max returns NaN for a row that holds NaN
    return ids.masked_fill(best.isnan(), -1)
