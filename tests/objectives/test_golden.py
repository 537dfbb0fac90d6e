"""GPT-NeoX's own numbers: its training.forward_step on fixed logits (golden/posttrain), made from seeds.

Its KTO differs, and is compat_kto here: it takes the KL from the other half of the micro-batch, averages
class weights over a half and multiplies rewards by the share of the row that is not padding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import Responses, with_responses
from megatron.methods.kto.objective import KtoSettings, kto
from megatron.methods.preferences.objective import dpo
from megatron.methods.preferences.pair_losses import PairSettings
from megatron.methods.reinforcement.objective import PolicySettings, RolloutValues, reinforcement, rollout_values
from megatron.objectives import language_modelling, response_sums
from tests.objectives.steps import as_head, step_loss

FOLDER = Path(__file__).parents[1] / "data" / "golden" / "posttrain"
SUMMARY: dict[str, dict[str, Any]] = json.loads((FOLDER / "summary.json").read_text())


def logits_of(name: str) -> tuple[Tensor, Tensor]:
    """The policy's and the reference's, `[batch, seq, vocab]`."""
    recipe = SUMMARY[name]
    random = np.random.RandomState(recipe["logits_seed"])
    shape, scale = recipe["logits_shape"], recipe["logits_scale"]
    policy, reference = ((random.randn(*shape) * scale).astype(np.float32) for _ in range(2))
    return torch.from_numpy(policy).requires_grad_(), torch.from_numpy(reference)


def read(name: str) -> dict[str, Tensor]:
    with np.load(FOLDER / name / "io.npz") as archive:
        return {key: torch.from_numpy(values) for key, values in archive.items()}


def with_reference(batch: Batch, logits: Tensor) -> Batch:
    logprobs = logits.log_softmax(-1).gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
    return with_responses(batch, reference_logprobs=response_sums(logprobs, batch))


def pairs(io_arrays: dict[str, Tensor]) -> tuple[Batch, list[int]]:
    """Upstream's rows are all chosen, then all rejected; ours alternate."""
    rows = [0, 2, 1, 3]
    tokens, labels, weights = (io_arrays[name][rows].long() for name in ("tokens", "labels", "loss_mask"))
    answers = torch.arange(4).unsqueeze(1).expand_as(tokens)
    return Batch(tokens, labels * weights, weights, method=Responses(answers, torch.ones(4))), rows


@pytest.mark.parametrize("name", ["dpo_beta0.1", "dpo_beta0.5", "dpo_reference_free"])
def test_dpo(name: str) -> None:
    expected = SUMMARY[name]
    policy, reference = logits_of(name)
    arrays = read("dpo_beta0.1")
    batch, rows = pairs(arrays)
    free = expected["args"]["dpo_reference_free"]
    batch = batch if free else with_reference(batch, reference[rows])
    objective = dpo({"sigmoid": 1.0}, PairSettings(expected["args"]["dpo_beta"]), reference_free=free)
    loss, metrics = step_loss(objective, lambda _: policy[rows].transpose(0, 1), [batch])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    names = {"chosen_pos": "logps/chosen", "chosen_neg": "logps/rejected", "chosen_rewards": "rewards/chosen",
             "rejected_rewards": "rewards/rejected", "reward_acc": "rewards/accuracies",
             "margins": "rewards/margins"}  # fmt: skip
    for key, value in expected["metrics"].items():
        if key in names:
            assert float(metrics[names[key]]) == pytest.approx(value, rel=1e-5, abs=1e-6), key
    if name == "dpo_beta0.1":
        torch.testing.assert_close(policy.grad, arrays["grad_policy_logits"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["kto", "kto_weights"])
def test_kto_of_upstream_behind_its_key(name: str) -> None:
    expected = SUMMARY[name]
    policy, reference = logits_of(name)
    arrays = read("kto")
    rewards, weights = arrays["batch_reward"], arrays["loss_mask"].long()
    answers = torch.where(rewards[:, :-1] != 0, torch.arange(4).unsqueeze(1), -1)
    batch = Batch(arrays["tokens"], arrays["labels"] * weights, weights, method=Responses(answers, rewards[:, 0]))
    batch = with_reference(batch, reference)
    args = expected["args"]
    settings = KtoSettings(args["kto_beta"], args["kto_desirable_weight"], args["kto_undesirable_weight"], neox=True)
    loss, _ = step_loss(kto(settings), lambda _: policy.transpose(0, 1), [batch])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    if name == "kto":
        torch.testing.assert_close(policy.grad, arrays["grad_policy_logits"], rtol=1e-4, atol=1e-7)


def test_masked_labels() -> None:
    policy, _ = logits_of("lm_labels")
    arrays = read("lm_labels")
    weights = arrays["loss_mask"].long()
    batch = Batch(arrays["tokens"], arrays["labels"] * weights, weights)
    loss, _ = step_loss(language_modelling(), lambda _: policy.transpose(0, 1), [batch])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(SUMMARY["lm_labels"]["loss"], rel=1e-5)
    assert policy.grad is not None
    norms, first_columns = policy.grad.double().norm(dim=-1), policy.grad[..., :32]
    torch.testing.assert_close(norms, arrays["grad_policy_logits_norm_per_position"], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(first_columns, arrays["grad_policy_logits_at_first32_vocab"], rtol=1e-4, atol=1e-8)


def rewarded(io_arrays: dict[str, Tensor], reference: Tensor) -> Batch:
    """GPT-NeoX's batch of REINFORCE: an answer a row, with its advantage."""
    tokens, weights = io_arrays["tokens"], io_arrays["loss_mask"].long()
    labels = io_arrays["labels"] * weights
    token_logprobs = reference.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    advantages, rewards = io_arrays["batch_reward"].flatten(), io_arrays["batch_raw_reward"].flatten()
    zeros = torch.zeros_like(token_logprobs)
    values = RolloutValues(advantages, zeros, rewards, reference_logprobs=token_logprobs)
    return Batch(tokens, labels, weights, method=values)


@pytest.mark.parametrize("name", ["mse", "abs", "kl", "full", "noref"])
def test_reinforce(name: str) -> None:
    """The loss is upstream's times the rows of the micro-batch, by which upstream divides once more."""
    expected, arrays = SUMMARY[f"reinforce_{name}"], read("reinforce_kl")
    policy, reference = logits_of(f"reinforce_{name}")
    beta = 0.0 if name == "noref" else expected["args"]["kl_div_beta"]
    objective = reinforcement("reinforce", PolicySettings(kl_beta=beta, kl_impl=name), 1.0)
    batch = rewarded(arrays, reference)
    output = as_head(reference.transpose(0, 1)).use
    batch = replace(batch, method=replace(rollout_values(batch), reference_output=output))
    loss, metrics = step_loss(objective, lambda _: policy.transpose(0, 1), [batch])
    rows = len(policy)
    (loss / rows).backward()
    assert float(loss.detach()) / rows == pytest.approx(expected["loss"], rel=1e-5)
    assert float(metrics["reward"]) == pytest.approx(expected["metrics"]["reward"], rel=1e-5)
    assert policy.grad is not None
    if name == "kl":
        norms, first_columns = policy.grad.norm(dim=-1).double(), policy.grad[..., :32]
        torch.testing.assert_close(norms, arrays["grad_policy_logits_norm_per_position"], rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(first_columns, arrays["grad_policy_logits_at_first32_vocab"], rtol=1e-4, atol=1e-8)
