"""Reward models: TRL's RewardTrainer 1.16 and GPT-NeoX's own numbers; any split of a step; the last token."""

from typing import Any

import pytest
import torch

from megatron.data import Batch
from megatron.data.preferences.responses import Responses, batch_responses, with_responses
from megatron.methods.reward.objective import reward
from megatron.objectives.preference import last_places
from megatron.training.method import build_objective
from tests.objectives.cases import MARGINS, PAIRS, documents_of, shared_in_rows
from tests.objectives.steps import arrays, assert_step, facts, step_loss
from tests.objectives.test_golden import SUMMARY, read
from tests.objectives.test_trl import PAIRWISE, pair_batches, stage_of, tiny_args

CASES: dict[str, dict[str, Any]] = facts("trl_reward")
RM = {**PAIRWISE, "train_impl": "rm"}
DOCUMENTS = documents_of(PAIRS)


def batches(layout: str) -> list[Batch]:
    if layout == "shared":
        return [shared_in_rows(DOCUMENTS, [[4, 5, 0, 1], [6, 7, 2, 3]], 48, [1.0] * 8)]
    return pair_batches(packed=layout == "packed")


def with_margins(micro_batches: list[Batch]) -> list[Batch]:
    left = [*MARGINS, 9.0]  # that of padding counts nowhere
    sizes = [len(batch_responses(batch).preference_labels) // 2 for batch in micro_batches]
    parts = torch.tensor(left[: sum(sizes)]).split(sizes)
    return [with_responses(batch, margins=part) for batch, part in zip(micro_batches, parts, strict=True)]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_metrics_are_those_of_trl(name: str, layout: str) -> None:
    case, micro_batches = CASES[name], batches(layout)
    args = tiny_args(**RM, center_rewards_coefficient=case.get("center_rewards_coefficient"))
    stage = stage_of("policy", "trl_reward", **RM)
    micro_batches = with_margins(micro_batches) if case.get("margin") else micro_batches
    gradient = arrays("trl_reward")[f"gradient_{name}"]
    metrics = assert_step(build_objective(args), stage, micro_batches, case["loss"], gradient)
    names = {"mean_reward", "accuracy", "margin"}
    names |= {"min_reward", "max_reward"} if layout != "padded" else set()  # of a micro-batch
    for key in names:
        assert metrics[key] == pytest.approx(case["metrics"][key], rel=2e-5, abs=1e-6), key


def test_the_score_is_that_of_the_last_token() -> None:
    for layout in ("padded", "packed", "shared"):
        for batch in batches(layout):
            responses, scored_tokens = batch_responses(batch), []
            for place in last_places(batch).tolist()[: int((responses.preference_labels != 0).sum())]:
                column, row = divmod(place, len(batch.tokens))
                scored_tokens.append((int(responses.response_ids[row, column]), int(batch.tokens[row, column])))
                next_response = responses.response_ids[row, column + 1 : column + 2].tolist()
                assert next_response != [scored_tokens[-1][0]]
            documents = (
                DOCUMENTS if len(scored_tokens) == 8 else DOCUMENTS[:2] if len(scored_tokens) == 2 else DOCUMENTS[2:]
            )
            assert scored_tokens == [(i, answer[-1]) for i, (_, answer) in enumerate(documents)]


@pytest.mark.parametrize("name", ["rm", "rm_zloss"])
def test_loss_gradient_and_metrics_are_those_of_gpt_neox(name: str) -> None:
    """GPT-NeoX reads the value before the last token, ours the last one: here answers end before it."""
    expected, arrays = SUMMARY[name], read("rm")
    values = arrays["policy_logits"].requires_grad_()
    rows = [0, 4, 1, 5, 2, 6, 3, 7]  # all chosen, then all rejected there; ours alternate
    tokens = arrays["tokens"][rows]
    is_response = torch.arange(tokens.shape[1]) <= arrays["loss_mask"].argmax(1)[rows].unsqueeze(1)
    responses = torch.where(is_response, torch.arange(8).unsqueeze(1), -1)
    batch = Batch(tokens, tokens, is_response.long(), method=Responses(responses, torch.ones(8)))
    objective = reward(z_loss=expected["args"]["z_loss"])
    loss, metrics = step_loss(objective, lambda _: values[rows].transpose(0, 1), [batch])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    for key, value in expected["metrics"].items():
        assert float(metrics[key]) == pytest.approx(value, rel=1e-5, abs=1e-6), key
    if name == "rm":
        torch.testing.assert_close(values.grad, arrays["grad_policy_logits"], rtol=1e-5, atol=1e-8)
