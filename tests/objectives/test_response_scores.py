"""Parts of preference losses at the edges: answers without tokens, a KL below zero."""

import pytest
import torch

from megatron.data import Batch
from megatron.data.preferences.responses import Responses, batch_responses
from megatron.objectives.preference import ResponseScores
from megatron.objectives.step_baselines import kl_baseline


def test_the_average_of_an_answer_without_tokens_is_finite() -> None:
    sums = torch.zeros(2)
    scores = ResponseScores(torch.zeros(1, 4), torch.tensor([-6.0, 0.0]), torch.tensor([3.0, 0.0]), sums, sums, sums)
    assert scores.average.tolist() == [-2.0, 0.0]


@pytest.mark.parametrize(("policy", "kl"), [([-3.0, -5.0, 9.0], 2.0), ([-9.0, -5.0, 9.0], 0.0)])
def test_kto_s_kl_is_the_mean_of_real_examples_and_not_below_zero(policy: list[float], kl: float) -> None:
    empty_rows = torch.zeros(1, 4, dtype=torch.int64)
    values = Responses(empty_rows, torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-6.0, -6.0, 0.0]))
    kl_examples = Batch(empty_rows, empty_rows, empty_rows, method=values)
    values = Responses(empty_rows, torch.tensor([1.0, 1.0]), kl_batch=kl_examples)
    batch = Batch(empty_rows, empty_rows, empty_rows, method=values)
    (with_kl,) = kl_baseline([batch], lambda batches: [torch.tensor(policy)], None)
    baseline = batch_responses(with_kl).baseline
    assert baseline is not None and baseline.tolist() == [kl, kl]
