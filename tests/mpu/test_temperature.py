"""Logits divided by a temperature: log-probabilities, their statistics and gradients beside torch's of all
logits in float64, and tokens that are chosen from them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.mpu import build_groups, choose_tokens, token_logprobs, token_logprobs_and_statistics
from tests.mpu.test_head import ALL_AT_ONCE, THREE_CHUNKS, VOCAB, Case, capped, case, head_of, places_of, sizes
from tests.pool import run_ranks

RUNS: list[dict[str, Any]] = [
    {"temperature": temperature, "softcap": softcap, "columns": columns, "kept": kept, "places": places}
    for temperature, softcap in ((0.7, None), (2.5, None), (0.7, 5.0), (2.5, 30.0), (1.0, 5.0))
    for columns, kept, places in ((None, 0, False), (VOCAB - 3, ALL_AT_ONCE, True))
]


def expected(given: Case, run: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Log-probabilities, entropies, mean logits, whether the label is on top, and gradients of hidden states
    and weight."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (given.hidden, given.weight))
    logits = capped((hidden @ weight.t())[..., : run["columns"]], run["softcap"]) / run["temperature"]
    distribution, labels = logits.log_softmax(-1), given.labels % (run["columns"] or VOCAB)
    logprobs = distribution.gather(-1, labels[..., None]).squeeze(-1)
    counted = torch.ones_like(given.grad)
    if run["places"]:
        counted = counted.view(-1).zero_().index_fill_(0, places_of(given), 1.0).view_as(counted)
    (logprobs * counted).backward(given.grad.to(dtype))
    assert hidden.grad is not None and weight.grad is not None
    entropy, top = -(distribution.exp() * distribution).sum(-1), logits.argmax(-1) == labels
    values = [value.detach() * counted for value in (logprobs, entropy, logits.mean(-1), top)]
    return [*values, hidden.grad, weight.grad]


def found(rank: int, world_size: int) -> list[list[Tensor]]:
    """For the pool: the same of this rank's rows of the vocabulary."""
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    results = []
    for run in RUNS:
        given, columns = case(), run["columns"]
        hidden = given.hidden.requires_grad_()
        weight = given.weight.chunk(world_size)[rank].contiguous().requires_grad_()
        places, labels = places_of(given) if run["places"] else None, given.labels % (columns or VOCAB)
        head = head_of(hidden, weight, softcap=run["softcap"])
        with sizes(THREE_CHUNKS * 4 // world_size, run["kept"]):
            options = group, columns, places, run["temperature"]
            logprobs, statistics = token_logprobs_and_statistics(head, labels, *options)
            logprobs.backward(given.grad)
            with torch.no_grad():
                assert torch.equal(token_logprobs(head, labels, *options), logprobs)
        assert hidden.grad is not None and weight.grad is not None
        results.append([logprobs.detach(), *statistics, hidden.grad, weight.grad])
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_and_gradients_are_torch_s(ranks: int) -> None:
    by_rank = run_ranks(found, ranks)
    for i, run in enumerate(RUNS):
        exact, rounded = expected(case(), run), expected(case(), run, torch.float32)
        ours = [results[i] for results in by_rank]
        for one in ours[1:]:
            assert all(torch.equal(a, b) for a, b in zip(one[:4], ours[0][:4], strict=True)), "ranks differ"
        gradients = sum(one[4] for one in ours), torch.cat([one[5] for one in ours])
        for mine, torchs, value in zip([*ours[0][:4], *gradients], rounded, exact, strict=True):
            errors = [float((other.double() - value).norm() / value.norm()) for other in (mine, torchs)]
            assert errors[0] <= max(2e-6, 1.2 * errors[1]), (run, errors)


def test_sixteen_bit_logits_are_divided_in_fp32() -> None:
    """Values and gradients differ from those of the same logits in fp32 by no more than without a
    temperature."""
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
        assert mine.grad is not None
        found.append(float((mine.grad.double() - expected).norm() / expected.norm()))
    assert found[1] <= 1.1 * found[0], found


PLACES = torch.tensor([3, 17, 64, 65, 70, 149, 0])  # of all three chunks, in no order


def second(logits: Tensor) -> Tensor:
    """The second likeliest token, so that it is not always the same as greedy's."""
    assert logits.shape[0] == len(PLACES)
    return logits.topk(2).indices[:, 1]


class Chosen:
    """Keeps the logits that it was shown."""

    def __init__(self) -> None:
        self.logits = torch.empty(0)

    def __call__(self, logits: Tensor) -> Tensor:
        self.logits = logits.clone()
        return second(logits)


def tokens_of(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For the pool: tokens, their log-probabilities and the logits that they were chosen from; of each the
    log-probability is what `token_logprobs` of all places has, to the bit."""
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    results = []
    for run in RUNS:
        given, choose = case(), Chosen()
        weight = given.weight.chunk(world_size)[rank].contiguous()
        head = head_of(given.hidden, weight, softcap=run["softcap"])
        with sizes(THREE_CHUNKS * 4 // world_size, 0):
            tokens, logprobs = choose_tokens(head, PLACES, choose, group, run["columns"], run["temperature"])
            labels = given.labels.flatten().index_copy(0, PLACES, tokens).view_as(given.labels)
            again = token_logprobs(head, labels, group, run["columns"], temperature=run["temperature"])
        assert torch.equal(again.flatten()[PLACES], logprobs)
        results.append((tokens, logprobs, choose.logits))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_chosen_from_whole_logits(ranks: int) -> None:
    by_rank = run_ranks(tokens_of, ranks)
    for i, run in enumerate(RUNS):
        given = case()
        hidden = given.hidden.flatten(0, 1)[PLACES].double()
        logits = capped((hidden @ given.weight.double().t())[:, : run["columns"]], run["softcap"])
        logits = logits / run["temperature"]
        tokens = second(logits)
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        for mine, of_tokens, shown in (results[i] for results in by_rank):
            assert torch.equal(mine, tokens), run
            torch.testing.assert_close(of_tokens.double(), logprobs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(shown.double(), logits, rtol=1e-5, atol=1e-5)
