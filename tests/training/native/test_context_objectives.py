"""Every kind of training under context parallelism: steps equal those of one process."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.methods.distillation.runs import LABELLED, student, teacher_keys
from tests.methods.distillation.test_on_policy import ON_POLICY, UNPACKED
from tests.methods.distillation.test_on_policy import steps_of as steps_on_policy
from tests.methods.distillation.test_runs import KINDS as DISTILLATIONS
from tests.methods.preferences.test_reference import preferences
from tests.methods.reinforcement.toy import assert_same_steps, for_pairs, steps_of, with_keys, write_task
from tests.methods.reward.test_runs import reward_data, values_of
from tests.methods.unlearning.test_runs import DIFFERENCE, NPO_BY_DOCUMENT
from tests.pool import run_ranks
from tests.training.native.test_context_parallel import CP2, CP4, DOCUMENTS, GATHER, MODELS, PP2, RING, ULYSSES
from tests.training.runs import ADAMW, LLAMA, SP2, Curve, assert_alike, cells, config, curves_of, run_to_end

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = ("megatron.methods",)
STEPS = 5
PADDED, PACKED, FLY = {"pack_impl": "unpacked"}, {"pack_impl": "best_fit"}, {"dpo_reference": "on_the_fly"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "gather 2": (2, CP2 | GATHER), "ring 2": (2, CP2 | RING), "ulysses 2": (2, CP2 | ULYSSES),
    "gather 4": (4, CP4 | GATHER), "gather 2 pp2": (4, CP2 | GATHER | PP2), "ring 2 tp2 sp": (4, CP2 | RING | SP2),
    "ulysses 2 pp2": (4, CP2 | ULYSSES | PP2),
}  # fmt: skip
OTHER_LAYOUTS = [name for name in LAYOUTS if name not in ("gather 2", "ulysses 2 pp2")]


def objectives(folder: Path) -> dict[str, dict[str, Any]]:
    small = {"num_layers": 2, "train_micro_batch_size_per_gpu": 2}
    teacher = str(folder / "teacher")
    distillations = {
        f"distillation, {kind}": student(teacher, parts, **keys) for kind, (parts, keys) in DISTILLATIONS.items()
    }
    return {
        "sft": config(LLAMA, ADAMW, LABELLED, small),
        "dpo": preferences(folder, PADDED, FLY, small, train_micro_batch_size_per_gpu=1),
        "dpo, shared prompts": preferences(folder, PACKED, small),
        "kto": preferences(folder, PADDED, FLY, small, train_impl="kto"),
        "kto, packed": preferences(folder, PACKED, small, train_impl="kto"),
        "gradient difference": config(LLAMA, ADAMW, DIFFERENCE, small),
        "npo": config(LLAMA, ADAMW, NPO_BY_DOCUMENT, small),
        "reward": values_of(reward_data(folder), PADDED, small, train_micro_batch_size_per_gpu=1),
        **distillations,
        "distillation, hybrid teacher": student(str(folder / "hybrid"), DOCUMENTS),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("objectives")
    run_ranks(run_to_end, 1, teacher_keys(save=str(folder / "teacher"), checkpoint_factor=6))
    hybrid = config(MODELS["hybrid"], train_iters=1, save=str(folder / "hybrid"), checkpoint_factor=1)
    run_ranks(run_to_end, 1, hybrid)  # reads two chunks of the columns; its student's documents are packed
    return objectives(folder)


@pytest.fixture(scope="module")
def one_process(runs: dict[str, dict[str, Any]]) -> dict[str, Curve]:
    return curves_of(runs, STEPS)


@pytest.mark.parametrize("layout", cells(["gather 2"], ["ulysses 2 pp2"], OTHER_LAYOUTS))
def test_objectives_equal_one_process(
    layout: str, runs: dict[str, dict[str, Any]], one_process: dict[str, Curve]
) -> None:
    ranks, keys = LAYOUTS[layout]
    curves = curves_of({name: {**values, **keys} for name, values in runs.items()}, STEPS, ranks)
    assert_alike(curves, one_process)
    assert curves["dpo"].losses[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("layout", cells([], ["gather 2"], ["ulysses 2 pp2", "ring 2"]))
@pytest.mark.parametrize("kind", ["group-relative", "exact", "pairs"])
def test_steps_on_own_answers_equal_one_process(kind: str, layout: str, tmp_path: Path) -> None:
    task, (ranks, keys) = write_task(tmp_path), LAYOUTS[layout]
    grpo = {"rl_loss_type": "grpo", "kl_div_beta": 0.05, "kl_impl": "k3", "rollout.exact": kind == "exact"}
    values = for_pairs(task, {"rollout.num_generations": 2}) if kind == "pairs" else with_keys(task, grpo)
    values = with_keys(values, {"train_micro_batch_size_per_gpu": 4})
    expected = run_ranks(steps_of, 1, values, STEPS)[0]
    assert_same_steps(run_ranks(steps_of, ranks, with_keys(values, keys), STEPS)[0], expected)


@pytest.mark.more
def test_a_student_on_policy_learns_as_in_one_process(runs: dict[str, dict[str, Any]]) -> None:
    teacher = runs["distillation, forward"]["distillation"]["teacher"]
    expected = run_ranks(steps_on_policy, 1, [student(teacher, UNPACKED, **ON_POLICY)])[0][0]
    for [steps] in run_ranks(steps_on_policy, 2, [student(teacher, UNPACKED, CP2, **ON_POLICY)]):
        for (role, loss, _), (expected_role, expected_loss, _) in zip(steps, expected, strict=True):
            assert role == expected_role and loss == pytest.approx(expected_loss, rel=1e-5)
