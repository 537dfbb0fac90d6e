"""Logits by a temperature in 16 bits, and tokens chosen from them. fp32: test_head.py's table."""

import pytest
import torch
from torch import Tensor

from megatron.mpu import build_groups, choose_tokens, token_logprobs
from tests.mpu.test_head import THREE_CHUNKS, VOCAB, capped, case, head_of, sizes
from tests.pool import run_ranks

# Temperature, cap of logits, columns of the vocabulary.
RUNS: list[tuple[float, float | None, int | None]] = [
    (0.7, None, None), (2.5, None, VOCAB - 3), (0.7, 5.0, VOCAB - 3), (2.5, 30.0, None), (1.0, 5.0, None),
]  # fmt: skip
PLACES = torch.tensor([3, 17, 64, 65, 70, 149, 0])  # of all three chunks, in no order


def test_sixteen_bit_logits_are_divided_in_fp32() -> None:
    """The error against the same logits in fp32 is no larger than without a temperature."""
    inputs = case()
    hidden, weight = inputs.hidden.bfloat16(), inputs.weight.bfloat16()
    logits, errors = (hidden @ weight.t()).double().requires_grad_(), list[float]()
    for temperature in (1.0, 0.7):
        leaf = hidden.clone().requires_grad_()
        logprobs = token_logprobs(head_of(leaf, weight), inputs.labels, None, temperature=temperature)
        exact = (logits / temperature).log_softmax(-1).gather(-1, inputs.labels[..., None]).squeeze(-1)
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)
        logprobs.backward(inputs.grad)
        (logit_grad,) = torch.autograd.grad(exact, logits, inputs.grad.double())
        expected = logit_grad @ weight.double()
        errors.append(float((leaf.grad.double() - expected).norm() / expected.norm()))  # type: ignore[union-attr]
    assert errors[1] <= 1.1 * errors[0], errors


def second_best(logits: Tensor) -> Tensor:
    """The second likeliest token, so that it is not always the same as greedy's."""
    assert logits.shape[0] == len(PLACES)
    return logits.topk(2).indices[:, 1]


def tokens_of(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For the pool: tokens, log-probabilities (`token_logprobs`'s to the bit) and logits chosen from."""
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    results = []
    for temperature, softcap, columns in RUNS:
        inputs, seen_logits = case(), list[Tensor]()
        weight = inputs.weight.chunk(world_size)[rank].contiguous()
        head = head_of(inputs.hidden, weight, softcap=softcap)
        with sizes(THREE_CHUNKS * 4 // world_size, 0):
            choose = lambda logits, seen_logits=seen_logits: seen_logits.append(logits.clone()) or second_best(logits)  # noqa: E731
            tokens, logprobs = choose_tokens(head, PLACES, choose, group, columns, temperature)
            labels = inputs.labels.flatten().index_copy(0, PLACES, tokens).view_as(inputs.labels)
            repeated = token_logprobs(head, labels, group, columns, temperature=temperature)
        assert torch.equal(repeated.flatten()[PLACES], logprobs)
        results.append((tokens, logprobs, seen_logits[-1]))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_chosen_from_full_logits(ranks: int) -> None:
    rank_results = run_ranks(tokens_of, ranks)
    for i, (temperature, softcap, columns) in enumerate(RUNS):
        inputs = case()
        hidden = inputs.hidden.flatten(0, 1)[PLACES].double()
        logits = capped((hidden @ inputs.weight.double().t())[:, :columns], softcap) / temperature
        tokens = second_best(logits)
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        for actual_tokens, actual_logprobs, actual_logits in (results[i] for results in rank_results):
            assert torch.equal(actual_tokens, tokens), i
            torch.testing.assert_close(actual_logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(actual_logits.double(), logits, rtol=1e-5, atol=1e-5)
