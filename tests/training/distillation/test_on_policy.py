"""Steps on policy: what is learned from, alike in every layout, and again after an interruption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.generation.on_policy import OnPolicy
from megatron.training.distillation.on_policy import is_on_policy, on_policy_steps
from megatron.training.loop import batches_of, train
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.distillation.runs import LABELLED, student
from tests.training.runs import begin, bit_equal

ON_POLICY: dict[str, Any] = {"lmbda": 0.3, "max_new_tokens": 6, "beta": 0.5, "weight": 0.7}
UNPACKED = {**LABELLED, "pack_impl": "unpacked", "allow_chopped": True, "train_iters": 6}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2, sp": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipe_parallel_size": 2}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "zero1, deepspeed": (2, {"zero_optimization": {"stage": 1}, "engine": "deepspeed"}),
    "zero3, deepspeed": (2, {"zero_optimization": {"stage": 3}, "engine": "deepspeed"}),
}


def steps_of(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[str, float, list[Any]]]:
    """For the pool: of six steps their role, loss, and this rank's tokens and trained places."""
    training = begin(values)
    batches = on_policy_steps(training.args, training.progress, batches_of(training), OnPolicy(training))
    found = []
    for number in range(6):
        step = next(batches)
        seen = [(batch.tokens, batch.loss_weights, batch.labels) for batch in step]
        role = step[0].role
        result = training.engine.train_step(step, training.schedule(number))
        of_divergence = float(result.loss) == pytest.approx(float(result.metrics["divergence"]), rel=1e-6)
        assert of_divergence == (role == "on_policy")  # whose labels are no reference
        training.progress.iteration += 1
        found.append((role, float(result.loss), seen))
    training.engine.close()
    return found


@pytest.fixture(scope="module")
def alone(teacher: str) -> list[tuple[str, float, list[Any]]]:
    return run_ranks(steps_of, 1, student(teacher, UNPACKED, **ON_POLICY))[0]


def test_the_student_answers_the_prompts_of_the_step(teacher: str, alone: list[Any]) -> None:
    plain = run_ranks(steps_of, 1, student(teacher, UNPACKED, **{**ON_POLICY, "lmbda": 1e-9}))[0]
    roles = [role for role, _, _ in alone]
    assert set(roles) == {"train", "on_policy"} and {role for role, _, _ in plain} == {"train"}
    for (role, _, ours), (_, _, data) in zip(alone, plain, strict=True):
        for (tokens, weights, labels), (of_data, trained, data_labels) in zip(ours, data, strict=True):
            if role == "train":
                assert torch.equal(tokens, of_data) and torch.equal(weights, trained)
                continue
            for row in range(len(tokens)):
                prompt = int(trained[row].argmax()) + 1
                answer = int(weights[row].sum())
                places = torch.zeros_like(weights[row]).index_fill(0, torch.arange(prompt - 1, prompt - 1 + answer), 1)
                assert torch.equal(tokens[row, :prompt], of_data[row, :prompt]) and torch.equal(weights[row], places)
                assert 1 <= answer <= 6 and prompt - 1 + answer <= tokens.shape[1]
                shifted = labels[row, prompt - 1 : prompt - 2 + answer]
                assert torch.equal(tokens[row, prompt : prompt - 1 + answer], shifted)
            assert not torch.equal(labels, data_labels)


@pytest.mark.parametrize(
    "name", with_more(LAYOUTS, "tp2, sp", "zero3", product=["dp2", "zero1, deepspeed", "zero3, deepspeed"])
)
def test_every_layout_equals_one_process(name: str, teacher: str, alone: list[Any]) -> None:
    ranks, layout = LAYOUTS[name]
    found = run_ranks(steps_of, ranks, student(teacher, UNPACKED, layout, **ON_POLICY))[0]
    assert [role for role, _, _ in found] == [role for role, _, _ in alone]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in alone], rel=1e-5)


def run(rank: int, world_size: int, values: dict[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    """For the pool: a whole run with its loop."""
    training = begin(values)
    train(training, (), OnPolicy(training))
    weights = training.engine.weights(master=True)
    training.engine.close()
    return {layer: {name: one.clone() for name, one in tensors.items()} for layer, tensors in weights.items()}


@pytest.mark.more
def test_a_run_that_is_cut_off_writes_the_same_answers(teacher: str, tmp_path: Path) -> None:
    values = student(teacher, UNPACKED, {"checkpoint_factor": 3}, **ON_POLICY)
    through = run_ranks(run, 1, {**values, "save": str(tmp_path / "through")})[0]
    cut = {**values, "save": str(tmp_path / "cut")}
    run_ranks(run, 1, {**cut, "exit_interval": 3})
    assert bit_equal(run_ranks(run, 1, cut)[0], through)
    assert losses(tmp_path / "cut") == losses(tmp_path / "through")


def test_the_share_of_steps_on_policy() -> None:
    from megatron.neox_arguments import NeoXArgs

    for share in (0.0, 0.25, 1.0):
        args = NeoXArgs.from_dict(student("teacher", UNPACKED, **{**ON_POLICY, "lmbda": share, "weight": 1.0})
                                  if share else student("teacher", UNPACKED, weight=1.0))  # fmt: skip
        assert sum(is_on_policy(args, i) for i in range(2000)) / 2000 == pytest.approx(share, abs=0.04)
