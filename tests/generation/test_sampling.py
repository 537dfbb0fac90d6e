"""The choice of a token: filters against transformers', frequencies against probabilities."""

from __future__ import annotations

import pytest
import torch

from megatron.generation import Sampling, filter_logits, next_tokens

LOGITS = torch.randn(8, 50, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("top_k", [1, 5, 49, 50, 80])
def test_top_k_equals_transformers(top_k: int) -> None:
    from transformers import TopKLogitsWarper

    expected = TopKLogitsWarper(top_k)(None, LOGITS.clone())
    torch.testing.assert_close(filter_logits(LOGITS, top_k=top_k), expected, rtol=0, atol=0)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999, 1.0])
def test_top_p_equals_transformers(top_p: float) -> None:
    from transformers import TopPLogitsWarper

    expected = TopPLogitsWarper(top_p)(None, LOGITS.clone())
    torch.testing.assert_close(filter_logits(LOGITS, top_p=top_p), expected, rtol=0, atol=0)


def test_top_p_is_of_what_top_k_leaves() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    expected = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(10)(None, LOGITS.clone()))
    assert not torch.equal(expected, TopKLogitsWarper(10)(None, TopPLogitsWarper(0.8)(None, LOGITS.clone())))
    torch.testing.assert_close(filter_logits(LOGITS, top_k=10, top_p=0.8), expected, rtol=0, atol=0)


def test_nothing_is_filtered_by_default() -> None:
    assert torch.equal(filter_logits(LOGITS), LOGITS)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5), Sampling(2.0, top_k=7), Sampling(0.8, 20, 0.7)])
def test_tokens_come_as_often_as_they_are_likely(sampling: Sampling) -> None:
    draws = 20_000  # evenly spaced, so that counts are exact up to one draw at either end of a token's interval
    logits = LOGITS[:1].expand(draws, -1)
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts = torch.bincount(next_tokens(logits, sampling, uniforms), minlength=50)
    kept = filter_logits(LOGITS[0:1] / sampling.temperature, sampling.top_k, sampling.top_p)
    torch.testing.assert_close(counts.float(), kept.softmax(-1)[0] * draws, rtol=0, atol=1.0)
    assert (counts == 0).sum() >= (kept == float("-inf")).sum()


def test_what_is_filtered_is_never_chosen() -> None:
    edges = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)  # the smallest and the largest draw
    logits = torch.tensor([[5.0, 0.0, 1.0, 5.0]])
    for uniform in edges:
        assert next_tokens(logits[:, [1, 0, 3, 2]], Sampling(1.0, top_k=2), uniform.view(1)).item() in (1, 2)


def test_temperature_zero_takes_the_most_likely() -> None:
    uniforms = torch.linspace(0, 0.99, 8, dtype=torch.float64)
    assert next_tokens(LOGITS, Sampling(0.0, top_k=5, top_p=0.5), uniforms).tolist() == LOGITS.argmax(-1).tolist()
