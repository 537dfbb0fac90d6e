"""Losses, gradients, metrics and advantages of TRL 1.16's GRPO and RLOO, in any split; GPT-NeoX's average."""

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from megatron.data import Batch
from megatron.methods.reinforcement.advantages import (
    HISTORY,
    group_relative,
    groups_without_signal,
    leave_one_out,
    moving_average_baseline,
)
from megatron.methods.reinforcement.answers import Answer, at_labels, batch_of
from megatron.methods.reinforcement.objective import MEANS, divergence, rollout_values
from megatron.neox_arguments.errors import ConfigError
from megatron.objectives.preference import DIFFERENCE
from megatron.training.method import build_objective
from tests.objectives.steps import arrays, assert_gradient, assert_step, facts, forward_of, step_loss
from tests.objectives.test_trl import stage_of, tiny_args

STORED, ARRAYS = facts("trl_policy"), arrays("trl_policy")
CASES: dict[str, dict[str, Any]] = STORED["cases"]
ROLLOUTS: dict[str, Any] = STORED["rollouts"]
SCORED: dict[str, dict[str, Any]] = STORED["advantages"]
SCALES: tuple[Literal["group", "batch", "none"], ...] = ("group", "batch", "none")
WIDTH = 20
SPLITS = (range(8),), (range(3), range(3, 8))


def loss_of(case: dict[str, Any]) -> str:
    """Our name of TRL's loss; in one micro-batch bnpo is dapo."""
    if case["kind"] == "rloo":
        return "rloo"
    if case.get("importance_sampling_level") == "sequence":
        return "gspo"
    return {"bnpo": "dapo"}.get(case["loss_type"], case["loss_type"])


def keys_of(case: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "train_impl": "reinforce", "dataset_impl": "online", "reward_functions": ["rewards.py:right"],
        "rl_loss_type": loss_of(case), "kl_div_beta": case["beta"], "rl_epsilon_high": case["epsilon_high"],
        "rl_importance_cap": case.get("vllm_importance_sampling_clip_max"),
        "rollout": {
            "prompts": ["prompts.jsonl"], "num_generations": ROLLOUTS["group"], "temperature": case["temperature"],
            "max_completion_length": ROLLOUTS["max_completion_length"],
        },
    }  # fmt: skip
    keys |= {"rl_epsilon": case["epsilon"]} if "epsilon" in case else {}
    keys |= {"rl_kl_by_ratio": True} if case.get("use_bias_correction_kl") else {}
    if case["beta"]:
        keys |= {"kl_impl": "kl", "rl_kl_in_reward": True} if case["kind"] == "rloo" else {"kl_impl": "k3"}
    return keys


def batches_of(name: str, rows: range, all_places: bool) -> Batch:
    """A micro-batch of answers as TRL was given them."""
    case, trl_arrays = CASES[name], ARRAYS
    old, reference = trl_arrays[f"old_{name}"], trl_arrays.get(f"reference_{name}")
    answers, old_rows = [], []
    for row, tokens in enumerate(ROLLOUTS["answers"]):
        mask = [bool(flag) for flag in ROLLOUTS["mask"][row]] if case.get("tools") else None
        sampler_logprobs = (old[row, : len(tokens)] - np.array(ROLLOUTS["below"][row])).tolist()
        answers.append(Answer(ROLLOUTS["prompts"][row], tokens, sampler_logprobs, True, mask))
        old_rows.append(old[row, : len(tokens)].tolist())
    batch = batch_of([answers[row] for row in rows], WIDTH, rewards=[ROLLOUTS["rewards"][row] for row in rows],
                     advantages=[float(trl_arrays[f"advantages_{name}"][row]) for row in rows],
                     old_logprobs=None if case.get("first") else [old_rows[row] for row in rows],
                     all_places=all_places)  # fmt: skip
    if reference is not None:
        values = [at_labels(answers[row], reference[row, : len(answers[row].tokens)], WIDTH) for row in rows]
        reference_logprobs = torch.from_numpy(np.stack(values))
        batch = replace(batch, method=replace(rollout_values(batch), reference_logprobs=reference_logprobs))
    return batch


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_metrics(name: str) -> None:
    case = CASES[name]
    trl_metrics = case["metrics"]
    for split in SPLITS:
        stage, batches = stage_of("policy"), [batches_of(name, rows, len(split) > 1) for rows in split]
        objective, gradient = build_objective(tiny_args(**keys_of(case))), ARRAYS[f"gradient_{name}"]
        metrics = assert_step(objective, stage, batches, case["loss"], gradient, close=5e-7)
        if case.get("accumulation"):  # theirs are of the last micro-batch
            continue
        pairs = {"entropy": "entropy", "clip_ratio/low_mean": "clip_ratio/low_mean"}
        pairs["clip_ratio/high_mean"] = "cispo_clip_ratio" if loss_of(case) == "cispo" else "clip_ratio/high_mean"
        if case.get("vllm"):
            pairs[DIFFERENCE] = "sampling/sampling_logp_difference/mean"
        if MEANS[loss_of(case)] != "answers":  # theirs is a mean over tokens, ours weighs them as the loss does
            pairs["kl"] = "kl"
        shared = [key for key in pairs if key in metrics and pairs[key] in trl_metrics]
        assert len(shared) >= 2
        for key in shared:
            assert metrics[key] == pytest.approx(trl_metrics[pairs[key]], rel=2e-5, abs=1e-6), key
    if case.get("first"):  # else cases are clipped, on both sides
        assert trl_metrics["clip_ratio/region_mean"] == 0.0
    elif loss_of(case) == "cispo":
        assert 0.05 < trl_metrics["cispo_clip_ratio"] < 0.95
    else:
        assert trl_metrics["clip_ratio/low_mean"] > 0.1 and trl_metrics["clip_ratio/high_mean"] > 0.1


def test_reinforce_has_the_gradient_of_a_first_step() -> None:
    """Ratio and log-probability have the same gradient where nothing is clipped yet."""
    keys, stage = {**keys_of(CASES["dapo_first"]), "rl_loss_type": "reinforce"}, stage_of("policy")
    objective = build_objective(tiny_args(**{key: value for key, value in keys.items() if "epsilon" not in key}))
    loss, _ = step_loss(objective, forward_of(stage), [batches_of("dapo_first", rows, False) for rows in SPLITS[1]])
    loss.backward()
    assert_gradient(stage, ARRAYS["gradient_dapo_first"])


@pytest.mark.parametrize("changes", [{"kl_impl": "full"}, {"rl_kl_in_reward": True},
                                     {"kl_impl": "mse", "kl_div_beta": 0.0}])  # fmt: skip
def test_a_ratio_needs_a_kl_of_tokens_in_the_loss(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rl_kl_by_ratio"):
        tiny_args(**{**keys_of(CASES["grpo_kl_by_ratio"]), **changes})


def test_estimators_of_the_kl() -> None:
    differences = torch.tensor([-2.0, 0.0, 1.0])
    logprobs = torch.tensor([-3.0, -1.0, -0.5])
    expected = {"kl": [-2.0, 0.0, 1.0], "abs": [2.0, 0.0, 1.0], "mse": [2.0, 0.0, 0.5],
                "k3": [math.exp(2.0) - 3.0, 0.0, math.exp(-1.0)]}  # fmt: skip
    for name, values in expected.items():
        torch.testing.assert_close(divergence(name, logprobs, logprobs - differences), torch.tensor(values))


@pytest.mark.parametrize("name", SCORED)
def test_advantages(name: str) -> None:
    nested_rewards = SCORED[name]["rewards"]
    rewards = np.array([math.nan if value is None else value for group in nested_rewards for value in group])
    size = ROLLOUTS["group"]
    for scale in SCALES:
        np.testing.assert_allclose(group_relative(rewards, size, scale), SCORED[name][scale], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(leave_one_out(rewards, size), SCORED[name]["leave_one_out"], rtol=1e-5, atol=1e-6)
    if name == "all":  # groups of too few rewards count here, and not there
        assert groups_without_signal(rewards, size) == SCORED[name]["equal"] == 0.25


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["kind"] == "rloo"])
def test_advantages_with_the_kl_in_rewards(name: str) -> None:
    case, trl_arrays = CASES[name], ARRAYS
    rewards = np.array(ROLLOUTS["rewards"])
    if case["beta"]:
        logprobs = (torch.from_numpy(trl_arrays[f"{key}_{name}"]) for key in ("old", "reference"))
        rewards = rewards - case["beta"] * divergence("kl", *logprobs).sum(1).double().numpy()
    actual = leave_one_out(rewards, ROLLOUTS["group"])
    np.testing.assert_allclose(actual, trl_arrays[f"advantages_{name}"], rtol=1e-5, atol=1e-6)


def test_a_moving_average() -> None:
    """GPT-NeoX's: of the last rewards, the new ones among them; one that is missing counts nowhere."""
    new = np.array([1.0, math.nan, 4.0, -2.0])
    np.testing.assert_allclose(moving_average_baseline(new, []), [0.0, 0.0, 3.0, -3.0])
    np.testing.assert_allclose(moving_average_baseline(new, [2.0, 5.0]), [-1.0, 0.0, 2.0, -4.0])
    history = np.arange(1000.0)
    mean = (sum(history[-(HISTORY - 3) :]) + 3.0) / HISTORY
    np.testing.assert_allclose(moving_average_baseline(new, history.tolist()), [1 - mean, 0.0, 4 - mean, -2 - mean])
    new_rewards = np.arange(HISTORY + 50.0)
    np.testing.assert_allclose(moving_average_baseline(new_rewards, [1e6]), new_rewards - new_rewards[50:].mean())
    np.testing.assert_array_equal(moving_average_baseline(np.full(3, math.nan), []), np.zeros(3))
