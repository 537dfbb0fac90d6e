"""NPO and SimNPO beside their papers, written out a sequence at a time."""

import math

import pytest
import torch

from megatron.methods.unlearning.objective import ForgetSettings, Sequences, npo, simnpo

COUNTS = torch.tensor([1.0, 7.0, 40.0, 250.0], dtype=torch.float64)


def sequences(seed: int) -> Sequences:
    random = torch.Generator().manual_seed(seed)
    logprobs = -COUNTS * torch.rand(4, generator=random, dtype=torch.float64) * 3
    reference = logprobs + torch.randn(4, generator=random, dtype=torch.float64) * 4
    return Sequences(logprobs.requires_grad_(), reference, COUNTS)


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.5])
def test_npo_and_its_gradient_are_the_paper_s(beta: float) -> None:
    """Equation 3, and the weight 2 p^beta / (p^beta + p_ref^beta) of the gradient of log p (section 3)."""
    case = sequences(1)
    losses = npo(case, ForgetSettings(npo_beta=beta))
    losses.sum().backward()
    assert case.reference is not None and case.logprobs.grad is not None
    pairs = zip(case.logprobs.tolist(), case.reference.tolist(), strict=True)
    for loss, slope, (p, q) in zip(losses.tolist(), case.logprobs.grad.tolist(), pairs, strict=True):
        assert loss == pytest.approx(2 / beta * math.log(1 + math.exp(beta * (p - q))), rel=1e-12)
        weight = 2 * math.exp(beta * p) / (math.exp(beta * p) + math.exp(beta * q))
        assert slope == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize(("beta", "gamma"), [(2.5, 0.0), (0.75, 1.0)])
def test_simnpo_is_the_paper_s(beta: float, gamma: float) -> None:
    """Equation 4; its gradient has the weight 2 p^(beta/|y|) / (1 + p^(beta/|y|)) / |y| for gamma 0."""
    case = sequences(3)
    losses = simnpo(case, ForgetSettings(simnpo_beta=beta, simnpo_gamma=gamma))
    losses.sum().backward()
    assert case.logprobs.grad is not None
    for loss, slope, p, n in zip(losses.tolist(), case.logprobs.grad.tolist(), case.logprobs.tolist(),
                                 COUNTS.tolist(), strict=True):  # fmt: skip
        odds = math.exp(beta * p / n + gamma)
        assert loss == pytest.approx(2 / beta * math.log(1 + odds), rel=1e-12)
        assert slope == pytest.approx(2 * odds / (1 + odds) / n, rel=1e-12)
