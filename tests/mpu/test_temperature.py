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
    """They differ from the same logits in fp32 by no more than without a temperature."""
    given = case()
    hidden, weight = given.hidden.bfloat16(), given.weight.bfloat16()
    logits, found = (hidden @ weight.t()).double().requires_grad_(), list[float]()
    for temperature in (1.0, 0.7):
        mine = hidden.clone().requires_grad_()
        logprobs = token_logprobs(head_of(mine, weight), given.labels, None, temperature=temperature)
        exact = (logits / temperature).log_softmax(-1).gather(-1, given.labels[..., None]).squeeze(-1)
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)
        logprobs.backward(given.grad)
        (of_logits,) = torch.autograd.grad(exact, logits, given.grad.double())
        expected = of_logits @ weight.double()
        found.append(float((mine.grad.double() - expected).norm() / expected.norm()))  # type: ignore[union-attr]
    assert found[1] <= 1.1 * found[0], found


def second(logits: Tensor) -> Tensor:
    """The second likeliest token, so that it is not always the same as greedy's."""
    assert logits.shape[0] == len(PLACES)
    return logits.topk(2).indices[:, 1]


def tokens_of(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For the pool: tokens, log-probabilities (`token_logprobs`'s to the bit) and logits chosen from."""
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    results = []
    for temperature, softcap, columns in RUNS:
        given, shown = case(), list[Tensor]()
        weight = given.weight.chunk(world_size)[rank].contiguous()
        head = head_of(given.hidden, weight, softcap=softcap)
        with sizes(THREE_CHUNKS * 4 // world_size, 0):
            choose = lambda logits, shown=shown: shown.append(logits.clone()) or second(logits)  # noqa: E731
            tokens, logprobs = choose_tokens(head, PLACES, choose, group, columns, temperature)
            labels = given.labels.flatten().index_copy(0, PLACES, tokens).view_as(given.labels)
            again = token_logprobs(head, labels, group, columns, temperature=temperature)
        assert torch.equal(again.flatten()[PLACES], logprobs)
        results.append((tokens, logprobs, shown[-1]))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_chosen_from_whole_logits(ranks: int) -> None:
    by_rank = run_ranks(tokens_of, ranks)
    for i, (temperature, softcap, columns) in enumerate(RUNS):
        given = case()
        hidden = given.hidden.flatten(0, 1)[PLACES].double()
        logits = capped((hidden @ given.weight.double().t())[:, :columns], softcap) / temperature
        tokens = second(logits)
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        for mine, of_tokens, shown in (results[i] for results in by_rank):
            assert torch.equal(mine, tokens), i
            torch.testing.assert_close(of_tokens.double(), logprobs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(shown.double(), logits, rtol=1e-5, atol=1e-5)
