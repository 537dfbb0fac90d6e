"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from megatron.neox_arguments import NeoXArgs

_CANDIDATES = 512  # most likely tokens that a nucleus is first looked for in, where sorting all is slow


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from logits, under the names of vLLM and transformers.

    temperature divides the logits, 0 takes the most likely token; top_k 0, top_p 0 and min_p 0 leave all
    tokens.

    logit_bias is added to the logits of tokens, (id, bias), before all else (OpenAI). repetition_penalty
    divides positive and multiplies negative logits of tokens in prompt and text (arXiv 1909.05858,
    transformers). frequency_penalty is subtracted as often as a token was generated, presence_penalty once
    (OpenAI).
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
        """The parameters that a configuration asks for."""
        return SamplingParams(
            args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.frequency_penalty,
            args.presence_penalty,
        )  # fmt: skip

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def filter_logits(
    logits: Tensor, top_k: Sequence[int] = (), top_p: Sequence[float] = (), min_p: Sequence[float] = ()
) -> Tensor:
    """`[rows, vocab]` with -inf where a token cannot be chosen: first top-k, then top-p of what is left
    (GPT-NeoX), then min-p; one value a row, nothing given: none.

    top_k keeps the k largest logits. top_p keeps the fewest tokens, most likely first, whose probabilities
    reach it (nucleus sampling, arXiv 1904.09751). min_p drops those less likely than so much of the most
    likely one (arXiv 2407.01082). Tokens as likely as the last one kept are kept too, so that a row depends
    on its own values alone.
    """
    vocab, device = logits.shape[-1], logits.device
    least = torch.full((len(logits), 1), float("-inf"), dtype=logits.dtype, device=device)
    if any(0 < k < vocab for k in top_k):
        k = torch.tensor([min(k, vocab) if k > 0 else vocab for k in top_k], device=device).unsqueeze(1)
        wide = max(k for k in top_k if k < vocab)
        kth = logits.topk(wide).values.gather(1, (k - 1).clamp(max=wide - 1))
        least = torch.where(k < vocab, kth, least)
    if any(0.0 < p < 1.0 for p in top_p):
        p = torch.tensor([p if 0.0 < p < 1.0 else 2.0 for p in top_p], dtype=logits.dtype, device=device).unsqueeze(1)
        least = torch.maximum(least, _nucleus(logits.masked_fill(logits < least, float("-inf")), p))
    if any(m > 0.0 for m in min_p):
        m = torch.tensor(min_p, dtype=logits.dtype, device=device).unsqueeze(1)
        least = torch.maximum(least, logits.amax(-1, keepdim=True) + m.log())
    return logits.masked_fill(logits < least, float("-inf"))


def _nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that each row's nucleus keeps, `[rows, 1]`; top_p above 1: -inf."""
    total, vocab = logits.logsumexp(-1, keepdim=True), logits.shape[-1]
    width = vocab if logits.is_cuda else min(_CANDIDATES, vocab)
    while True:
        ordered = logits.topk(width).values if width < vocab else logits.sort(descending=True).values
        probabilities = (ordered - total).exp()
        reached = probabilities.cumsum(-1)
        if width == vocab or bool(((reached[:, -1:] >= top_p) | (top_p > 1.0)).all()):
            break
        width = vocab
    kept = (reached - probabilities <= top_p).sum(-1, keepdim=True)
    return torch.where(top_p > 1.0, float("-inf"), ordered.gather(1, kept - 1))


class TokenSampler:
    """Chooses a token for each row of a batch, whose parameters may differ; made once for as long as the rows
    run together, since penalties depend on all tokens so far."""

    def __init__(
        self,
        samplings: Sequence[SamplingParams],
        texts: Sequence[tuple[int, Sequence[int]]],
        vocab: int,
        device: torch.device,
        minimums: Sequence[tuple[int, Collection[int]]] = (),
    ) -> None:
        """texts: of each row the length of its prompt, and all its tokens. vocab: tokens that exist.
        minimums: of each row how many tokens are generated before a stop token may come, and its stop tokens;
        empty: no minimum."""
        self.device, self.vocab = device, vocab
        biases = [(row, *bias) for row, one in enumerate(samplings) for bias in one.logit_bias]
        self.biased = self._flat([[row for row, _, _ in biases]]), self._flat([[token for _, token, _ in biases]])
        self.bias = self._tensor([float(value) for _, _, value in biases]) if biases else None
        pairs = zip(minimums, texts, strict=True) if minimums else ()
        self.minimums_left = [(minimum - len(tokens) + start, ends) for (minimum, ends), (start, tokens) in pairs]
        self.banned = self._stop_tokens_too_early()
        sampled = [i for i, one in enumerate(samplings) if one.temperature > 0.0]
        self.sampled_rows = sampled  # the others take the most likely token
        self.all_sampled = len(sampled) == len(samplings)
        self.rows = self._tensor(sampled)
        params = [samplings[i] for i in sampled]
        self.temperature = self._tensor([one.temperature for one in params]).unsqueeze(1)
        self.filters = [one.top_k for one in params], [one.top_p for one in params], [one.min_p for one in params]
        self.penalised = [i for i, one in enumerate(samplings) if one.penalised]
        if self.penalised:
            penalised = [(samplings[i], *texts[i]) for i in self.penalised]
            self.penalised_rows = self._tensor(self.penalised)
            self.repetition, self.frequency, self.presence = (
                self._tensor([getattr(one, name) for one, _, _ in penalised]).unsqueeze(1)
                for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
            )
            self.seen = torch.zeros(len(penalised), vocab, dtype=torch.bool, device=device)
            self.counts = torch.zeros(len(penalised), vocab, device=device)
            places = [[i] * len(tokens) for i, (_, _, tokens) in enumerate(penalised)]
            rows, ids = self._flat(places), self._flat([tokens for _, _, tokens in penalised])
            self.seen[rows, ids] = True
            rows = self._flat([place[start:] for place, (_, start, _) in zip(places, penalised, strict=True)])
            ids = self._flat([tokens[start:] for _, start, tokens in penalised])
            self.counts.index_put_((rows, ids), torch.ones(len(ids), device=device), accumulate=True)

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _flat(self, values: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(list(chain.from_iterable(values)), dtype=torch.long, device=self.device)

    def sample(self, logits: Tensor, uniforms: Sequence[float]) -> Tensor:
        """The next token id of each row, `[rows]` int64; -1 where logits are not numbers.

        logits: fp32 `[rows, vocab]`, only tokens that exist. uniforms: in [0, 1), one for each of
        `sampled_rows`.
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
        kept = filter_logits(sampled / self.temperature, *self.filters)
        total = kept.softmax(-1, dtype=torch.float64).cumsum(-1)
        draws = torch.tensor(uniforms, dtype=torch.float64, device=self.device).unsqueeze(1) * total[:, -1:]
        tokens = torch.searchsorted(total, draws, right=True).squeeze(-1)
        tokens = tokens.masked_fill(total[:, -1].isnan(), -1)
        return tokens if self.all_sampled else _most_likely(logits).index_copy(0, self.rows, tokens)

    def _stop_tokens_too_early(self) -> tuple[Tensor, Tensor] | None:
        """Rows and ids, `[n]` each, of the stop tokens that may not come yet; None: there are none."""
        rows = [row for row, (left, _) in enumerate(self.minimums_left) if left > 0]
        ids = [[token for token in self.minimums_left[row][1] if 0 <= token < self.vocab] for row in rows]
        places = [[row] * len(stop_ids) for row, stop_ids in zip(rows, ids, strict=True)]
        return (self._flat(places), self._flat(ids)) if any(ids) else None

    def _penalise(self, logits: Tensor) -> Tensor:
        penalised = logits[self.penalised_rows]
        scaled = torch.where(penalised > 0, penalised / self.repetition, penalised * self.repetition)
        penalised = torch.where(self.seen, scaled, penalised)
        penalised = penalised - self.counts * self.frequency - (self.counts > 0) * self.presence
        return logits.index_copy(0, self.penalised_rows, penalised)

    def update(self, tokens: Tensor) -> None:
        """Take note of the tokens that were chosen, `[rows]` int64, for penalties and minimums of the next
        ones."""
        if self.banned is not None:
            self.minimums_left = [(left - 1, ends) for left, ends in self.minimums_left]
            if any(left == 0 for left, _ in self.minimums_left):
                self.banned = self._stop_tokens_too_early()
        if self.penalised:
            ids = tokens.to(self.device)[self.penalised_rows].unsqueeze(1)
            self.seen.scatter_(1, ids, True)
            self.counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=self.counts.dtype))


def _most_likely(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, -1 where one is NaN."""
    best, ids = logits.max(-1)  # which counts NaN as the largest
    return ids.masked_fill(best.isnan(), -1)
