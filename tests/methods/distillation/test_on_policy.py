"""Steps on policy: what is learned from, alike in every layout, and again after an interruption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.methods.distillation.method import is_on_policy
from megatron.neox_arguments import NeoXArgs
from megatron.training import loop
from tests.methods.distillation.runs import LABELLED, LAYOUTS, student
from tests.pool import run_ranks
from tests.training.native.in_turn import TIMEOUT, assert_resumes
from tests.training.runs import begin_each, cells

ON_POLICY: dict[str, Any] = {"lmbda": 0.3, "max_new_tokens": 6, "beta": 0.5, "weight": 0.7}
UNPACKED = {**LABELLED, "pack_impl": "unpacked", "allow_chopped": True, "train_iters": 6}
STEPS = 4
Steps = list[tuple[str, float, list[Any]]]


def steps_of(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[Steps]:
    """For the pool: of each run's first steps their role, loss, and this rank's tokens and trained places."""
    runs = []
    for training in begin_each(configs):
        steps = list[tuple[str, float, list[Any]]]()
        training.method.begin(training)
        data_of_steps = loop.steps_of(training)
        for number in range(STEPS):
            data = next(data_of_steps)
            step = data.batches
            batch_tensors = [(batch.tokens, batch.loss_weights, batch.labels) for batch in step]
            role = data.role
            result = training.engine.train_step(step, training.schedule(number))
            loss_is_divergence = float(result.loss) == pytest.approx(float(result.metrics["divergence"]), rel=1e-6)
            assert loss_is_divergence == (role == "on_policy")  # whose labels are no reference
            training.progress.iteration += 1
            steps.append((role, float(result.loss), batch_tensors))
        runs.append(steps)
    return runs


@pytest.fixture(scope="module")
def one_process(teacher: str) -> list[Steps]:
    """Steps of a run, and of the same run without steps on policy."""
    keys = (ON_POLICY, {**ON_POLICY, "lmbda": 1e-9})
    return run_ranks(steps_of, 1, [student(teacher, UNPACKED, **distillation_keys) for distillation_keys in keys])[0]


def test_the_student_answers_the_prompts_of_the_step(one_process: list[Steps]) -> None:
    assert [{role for role, _, _ in steps} for steps in one_process] == [{"train", "on_policy"}, {"train"}]
    for (role, _, student_batches), (_, _, data) in zip(*one_process, strict=True):
        for (tokens, weights, labels), (data_tokens, trained, data_labels) in zip(student_batches, data, strict=True):
            if role == "train":
                assert torch.equal(tokens, data_tokens) and torch.equal(weights, trained)
                continue
            for row in range(len(tokens)):
                prompt, answer = int(trained[row].argmax()) + 1, int(weights[row].sum())
                places = torch.zeros_like(weights[row]).index_fill(0, torch.arange(prompt - 1, prompt - 1 + answer), 1)
                assert torch.equal(tokens[row, :prompt], data_tokens[row, :prompt]) and torch.equal(
                    weights[row], places
                )
                assert 1 <= answer <= 6 and prompt - 1 + answer <= tokens.shape[1]
                shifted = labels[row, prompt - 1 : prompt - 2 + answer]
                assert torch.equal(tokens[row, prompt : prompt - 1 + answer], shifted)
            assert not torch.equal(labels, data_labels)


@pytest.mark.parametrize("names", cells([(("pp2", "tp2 sp"),)], product=[(tuple(LAYOUTS),)]))
def test_layouts_equal_one_process(names: tuple[str, ...], teacher: str, one_process: list[Steps]) -> None:
    runs = [student(teacher, UNPACKED, LAYOUTS[name], **ON_POLICY) for name in names]
    for name, steps in zip(names, run_ranks(steps_of, 2, runs, timeout=TIMEOUT)[0], strict=True):
        assert [role for role, _, _ in steps] == [role for role, _, _ in one_process[0]], name
        assert [loss for _, loss, _ in steps] == pytest.approx([loss for _, loss, _ in one_process[0]], rel=1e-5), name


def test_an_interrupted_run_resumes_bit_for_bit(teacher: str, tmp_path: Path) -> None:
    """After the cut there is a step of each kind."""
    values = student(teacher, UNPACKED, {"train_iters": STEPS}, **ON_POLICY)
    assert [is_on_policy(NeoXArgs.from_dict(values), step) for step in (2, 3)] == [False, True]
    assert_resumes(values, tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_of_steps_on_policy(share: float) -> None:
    keys = {**ON_POLICY, "lmbda": share, "weight": 1.0} if share else {"weight": 1.0}
    args = NeoXArgs.from_dict(student("teacher", UNPACKED, **keys))
    assert sum(is_on_policy(args, i) for i in range(2000)) / 2000 == pytest.approx(share, abs=0.04)
