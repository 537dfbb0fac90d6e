"""KL of two heads' distributions in chunks over a cut vocabulary, beside torch's kl_div of all logits at
once in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import build_groups, token_divergence_sum
from tests.mpu.test_head import ALL_AT_ONCE, BATCH, SEQ, THREE_CHUNKS, VOCAB, Case, case, head_of, sizes
from tests.pool import run_ranks

PLACES = torch.tensor([0, 5, 6, 40, 77, 149])


def models() -> tuple[Case, Case]:
    """A model, and a reference near it."""
    model, other = case(), case()
    random = torch.Generator().manual_seed(5)
    moved = (other.hidden + 0.3 * torch.randn(other.hidden.shape, generator=random), other.weight * 0.9)
    return model, other._replace(hidden=moved[0], weight=moved[1])


def expected(columns: int | None, places: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The sum by torch's kl_div, and its gradients of hidden states and weight."""
    model, reference = models()
    hidden, weight = (x.double().requires_grad_() for x in (model.hidden, model.weight))
    logits = (hidden @ weight.t())[..., :columns]
    others = (reference.hidden.double() @ reference.weight.double().t())[..., :columns]
    of_tokens = F.kl_div(logits.log_softmax(-1), others.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    weights = model.weights.double()
    if places is not None:
        chosen = torch.zeros(SEQ * BATCH, dtype=torch.float64).index_fill(0, places, 1.0)
        weights = weights * chosen.view(SEQ, BATCH)
    loss = (of_tokens * weights).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def found(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For the pool: the same by `token_divergence_sum`, of this rank's rows of the vocabulary."""
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    results = []
    for run in runs:
        model, reference = models()
        rows = slice(rank * VOCAB // world_size, (rank + 1) * VOCAB // world_size)
        hidden, weight = model.hidden.clone().requires_grad_(), model.weight[rows].clone().requires_grad_()
        use = head_of(reference.hidden, reference.weight[rows]).use
        with sizes(run["chunk"], 0):
            args = model.weights, group, run["columns"], run["places"]
            loss = token_divergence_sum(head_of(hidden, weight), use, *args)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((loss.detach(), hidden.grad, weight.grad))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_torch_s_divergence(ranks: int) -> None:
    runs = [
        {"chunk": chunk, "columns": columns, "places": places}
        for chunk in (ALL_AT_ONCE, THREE_CHUNKS)
        for columns in (None, VOCAB - 3, VOCAB // 2 - 2)  # the last leaves the second rank no column
        for places in (None, PLACES)
    ]
    by_rank = run_ranks(found, ranks, runs)
    for i, run in enumerate(runs):
        loss, of_hidden, of_weight = expected(run["columns"], run["places"])
        ours = [results[i] for results in by_rank]
        for one in ours:
            torch.testing.assert_close(one[0].double(), loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(sum(one[1] for one in ours).double(), of_hidden, rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(torch.cat([one[2] for one in ours]).double(), of_weight, rtol=1e-5, atol=1e-5)


def test_of_a_model_and_itself_it_is_nothing() -> None:
    model = case()
    hidden = model.hidden.clone().requires_grad_()
    loss = token_divergence_sum(
        head_of(hidden, model.weight), head_of(model.hidden, model.weight).use, model.weights, None
    )
    loss.backward()
    assert hidden.grad is not None and float(loss.detach()) == 0.0 and not hidden.grad.any()
