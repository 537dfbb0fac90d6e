"""The choice of a token: filters and penalties against transformers', frequencies against probabilities."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron.generation import SamplingParams
from megatron.generation.sampling import TokenSampler, filter_logits

VOCAB = 700  # more than are looked at first for a nucleus
LOGITS = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
ROWS = len(LOGITS)


def chooser_of(samplings: Sequence[SamplingParams],
               texts: Sequence[tuple[int, list[int]]] | None = None) -> TokenSampler:  # fmt: skip
    return TokenSampler(samplings, texts or [(1, [0])] * len(samplings), VOCAB, torch.device("cpu"))


@pytest.mark.parametrize("flatter", [1.0, 30.0])  # the nucleus is larger than the first candidates
@pytest.mark.parametrize(("name", "warper", "values"), [
    ("top_k", transformers.TopKLogitsWarper, [1, 5, 49, VOCAB, VOCAB + 9]),
    ("top_p", transformers.TopPLogitsWarper, [0.01, 0.3, 0.9, 0.999, 1.0]),
    ("min_p", transformers.MinPLogitsWarper, [1e-5, 0.02, 0.5, 1.0]),
])  # fmt: skip
def test_filters_equal_transformers(name: str, warper: Any, values: list[Any], flatter: float) -> None:
    logits = LOGITS / flatter
    for value in values:
        expected = warper(value)(None, logits.clone())
        torch.testing.assert_close(filter_logits(logits, **{name: [value] * ROWS}), expected, rtol=0, atol=0)


def test_biases_and_least_lengths_equal_transformers() -> None:
    """Rows with, and rows without, step by step until all may end."""
    bias = {3: 7.5, 40: -100.0, 699: 2.0}
    logits = torch.zeros(3, VOCAB)
    logits[:, 5], logits[:, 3] = 9.0, 1.0  # the first is one of the ends
    samplings = [SamplingParams(logit_bias=tuple(bias.items())), SamplingParams(), SamplingParams()]
    tokens = [[1, 2], [1, 2], [1, 2]]
    minimum_lengths = [(2, (5, 3)), (1, (5, VOCAB + 1)), (0, (5,))]
    sampler = TokenSampler(
        samplings, [(2, sequence) for sequence in tokens], VOCAB, torch.device("cpu"), minimum_lengths
    )
    biased = transformers.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    for _ in range(4):
        expected = []
        for row, sequence in enumerate(tokens):
            ids, scores = torch.tensor([sequence]), logits[row : row + 1].clone()
            scores = biased(ids, scores) if row == 0 else scores
            ends = [end for end in minimum_lengths[row][1] if end < VOCAB]
            least_of_row = transformers.MinNewTokensLengthLogitsProcessor(
                2, minimum_lengths[row][0], ends, device="cpu"
            )
            scores = least_of_row(ids, scores)
            expected.append(int(scores.argmax()))
        chosen = sampler.sample(logits, [])
        assert chosen.tolist() == expected
        sampler.update(chosen)
        for sequence, token in zip(tokens, expected, strict=True):
            sequence.append(token)
    assert tokens[0][2:] == [699, 699, 5, 5] and tokens[1][2:] == [3, 5, 5, 5] and tokens[2][2:] == [5] * 4


def test_rows_are_filtered_each_in_its_own_way() -> None:
    """In transformers' order; rows of one batch as if they were alone."""
    filters = [(10, 0.8, 0.0), (0, 0.0, 0.0), (3, 0.0, 0.0), (0, 0.5, 0.0), (0, 0.0, 0.1), (600, 0.95, 0.01), (1, 1, 1)]
    kinds = (transformers.TopKLogitsWarper, transformers.TopPLogitsWarper, transformers.MinPLogitsWarper)
    logits = LOGITS[: len(filters)]
    filtered = filter_logits(logits, *zip(*filters, strict=True))
    for row, values in enumerate(filters):
        expected = logits[row : row + 1].clone()
        for value, kind in zip(values, kinds, strict=True):
            expected = kind(value)(None, expected) if value else expected
        assert torch.equal(filtered[row], expected[0]), values
        assert torch.equal(filter_logits(logits[row : row + 1], *([value] for value in values))[0], expected[0])
    assert torch.equal(filter_logits(LOGITS), LOGITS)


@pytest.mark.parametrize("sampling", [SamplingParams(0.5), SamplingParams(2.0, top_k=7), SamplingParams(0.8, 20, 0.7),
                                      SamplingParams(1.5, min_p=0.05)])  # fmt: skip
def test_tokens_come_as_often_as_they_are_likely(sampling: SamplingParams) -> None:
    draws = 20_000  # evenly spaced, so that counts are exact up to one draw at either end of a token's interval
    logits = LOGITS[:1, :50].expand(draws, -1)
    uniforms = ((torch.arange(draws, dtype=torch.float64) + 0.5) / draws).tolist()
    counts = torch.bincount(chooser_of([sampling] * draws).sample(logits, uniforms), minlength=50)
    filters = [sampling.top_k], [sampling.top_p], [sampling.min_p]
    filtered = filter_logits(LOGITS[:1, :50] / sampling.temperature, *filters)
    torch.testing.assert_close(counts.float(), filtered.softmax(-1)[0] * draws, rtol=0, atol=1.0)
    assert (counts == 0).sum() >= (filtered == float("-inf")).sum()


def test_what_is_filtered_is_never_chosen() -> None:
    for uniform in (0.0, 1.0 - 2.0**-53):  # the smallest and the largest draw
        logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
        assert chooser_of([SamplingParams(1.0, top_k=2)]).sample(logits, [uniform]).item() in (1, 2)


def test_greedy_and_sampled_rows_of_one_batch() -> None:
    """Temperature 0 takes the most likely, whatever the filters."""
    samplings = [SamplingParams(0.0, 5, 0.5), SamplingParams(1.0), SamplingParams(), SamplingParams(2.0, 5)]
    sampler = chooser_of(samplings)
    assert sampler.sampled_rows == [1, 3] and chooser_of(samplings[::2]).sampled_rows == []
    chosen = sampler.sample(LOGITS[:4], [0.7, 0.2]).tolist()
    assert chosen[::2] == LOGITS[:4:2].argmax(-1).tolist()
    for i, (sampling, draw) in enumerate(zip(samplings, [0.7, 0.7, 0.2, 0.2], strict=True)):
        assert chooser_of([sampling]).sample(LOGITS[i : i + 1], [draw]).item() == chosen[i]


def test_repetition_penalty_equals_transformers() -> None:
    texts = [[4, 9, 9, 30], [1, 2, 3, 699], [0, 0, 0, 0]]
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(texts), LOGITS[:3].clone())
    chooser = chooser_of([SamplingParams(repetition_penalty=1.7)] * 3, [(2, text[:3]) for text in texts])
    chooser.update(torch.tensor([text[3] for text in texts]))
    torch.testing.assert_close(chooser._penalise(LOGITS[:3]), expected, rtol=0, atol=0)


def openai(logits: Tensor, generated: list[int], frequency: float, presence: float) -> Tensor:
    """`mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence`, says OpenAI."""
    penalised = logits.clone()
    for token in set(generated):
        penalised[token] -= generated.count(token) * frequency + presence
    return penalised


def test_frequency_and_presence_penalties_are_openai_s() -> None:
    """Penalties count generated tokens only, row by row; a row without penalties is unchanged."""
    mixed = SamplingParams(frequency_penalty=-0.3, presence_penalty=1.5)
    samplings = [SamplingParams(frequency_penalty=0.5), SamplingParams(), mixed]
    chooser = chooser_of(samplings, [(2, [7, 7, 9]), (1, [5]), (1, [3, 4, 4, 6])])
    chooser.update(torch.tensor([9, 8, 4]))
    penalised = chooser._penalise(LOGITS[:3])
    expected = [openai(LOGITS[0], [9, 9], 0.5, 0.0), LOGITS[1], openai(LOGITS[2], [4, 4, 6, 4], -0.3, 1.5)]
    torch.testing.assert_close(penalised, torch.stack(expected))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_a_number_is_told(temperature: float) -> None:
    logits = LOGITS[:2].clone()
    logits[1, 5] = float("nan")
    chosen = chooser_of([SamplingParams(temperature)] * 2).sample(logits, [0.5, 0.5][: 2 * int(temperature)])
    assert chosen.tolist()[1] == -1
