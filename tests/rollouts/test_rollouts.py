"""Training with rewards: the same answers and steps in every layout, no difference between sampler and
trainer, and what happens where there is one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.initial_weights import write_initial_weights
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives.reinforcement import DIFFERENCE
from megatron.rollouts import generation
from megatron.rollouts.answers import Answer, batch_of
from megatron.rollouts.generation import overlong
from megatron.rollouts.record import LogprobDifferenceError
from megatron.tokenizer import build_tokenizer, with_vocabulary
from megatron.training import train
from tests.pool import run_ranks
from tests.rollouts.toy import Seen, rollouts_of, steps_of, whole_run, write_task
from tests.training.runs import begin

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2, sp": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 4}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "zero1, deepspeed": (2, {"zero_optimization": {"stage": 1}, "engine": "deepspeed"}),
    "zero3, deepspeed": (2, {"zero_optimization": {"stage": 3}, "engine": "deepspeed"}),
}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo, kl": {"rl_loss_type": "grpo", "kl_div_beta": 0.05, "kl_impl": "k3"},
    "rloo, kl in reward": {"rl_loss_type": "rloo", "kl_div_beta": 0.05, "kl_impl": "kl", "rl_kl_in_reward": True},
    "reinforce, whole kl": {"rl_loss_type": "reinforce", "kl_div_beta": 0.05, "kl_impl": "full"},
    "dapo, two epochs": {"rl_loss_type": "dapo", "rollout.num_iterations": 2, "rollout.steps_per_generation": 2},
}


def with_keys(task: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with keys changed, of sections by dotted path."""
    values = {**task, "rollout": dict(task["rollout"])}
    for change in changes:
        for key, value in change.items():
            section, _, name = key.rpartition(".")
            (values[section] if section else values)[name] = value
    return values


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def alone(task: dict[str, Any]) -> dict[str, Seen]:
    return {
        name: run_ranks(steps_of, 1, with_keys(task, LOSSES[name]), 4)[0] for name in ("grpo, kl", "dapo, two epochs")
    }


@pytest.mark.parametrize("loss", ["grpo, kl", "dapo, two epochs"])
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ("dp2", "pp2") else pytest.mark.more) for name in LAYOUTS]
)
def test_layouts_equal_one_process(layout: str, loss: str, task: dict[str, Any], alone: dict[str, Seen]) -> None:
    ranks, keys = LAYOUTS[layout]
    ours, reference = run_ranks(steps_of, ranks, with_keys(task, LOSSES[loss], keys), 4)[0], alone[loss]
    assert ours.answers == reference.answers
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5, abs=1e-6)
    assert ours.norms == pytest.approx(reference.norms, rel=1e-4)
    for now, then in zip(ours.metrics, reference.metrics, strict=True):
        assert now == pytest.approx(then, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("loss", ["rloo, kl in reward", "reinforce, whole kl"])
def test_other_losses_in_two_ranks(loss: str, task: dict[str, Any]) -> None:
    values = with_keys(task, LOSSES[loss])
    one = run_ranks(steps_of, 1, values)[0]
    two = run_ranks(steps_of, 2, with_keys(values, {"model_parallel_size": 2}))[0]
    assert one.answers == two.answers and one.losses == pytest.approx(two.losses, rel=1e-5, abs=1e-6)
    assert one.metrics[-1]["kl"] != 0.0 and one.metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "layout", [None, "tp2, sp", "pp2", pytest.param("zero3", marks=pytest.mark.more)], ids=lambda name: name or "alone"
)
def test_exact_sampling_differs_by_nothing(layout: str | None, task: dict[str, Any]) -> None:
    ranks, keys = LAYOUTS[layout] if layout is not None else (1, {})
    for seen in run_ranks(steps_of, ranks, with_keys(task, keys, {"rollout.exact": True, "rollout.temperature": 0.7})):
        for metrics in seen.metrics:
            assert metrics[DIFFERENCE] == 0.0 and metrics[f"{DIFFERENCE}_max"] == 0.0


def test_the_engine_s_sampling_differs_by_rounding(task: dict[str, Any]) -> None:
    exact, ours = (
        run_ranks(steps_of, 1, with_keys(task, {"rollout.exact": exact, "rollout.temperature": 0.7}))[0]
        for exact in (True, False)
    )
    assert all(0.0 < metrics[f"{DIFFERENCE}_max"] < 1e-4 for metrics in ours.metrics)
    assert ours.answers == exact.answers and ours.losses == pytest.approx(exact.losses, rel=1e-5, abs=1e-6)


def with_stale_weights(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: a run whose sampler answers by the weights of its beginning."""
    training = begin(values)
    rollouts = rollouts_of(training)
    sample, engine, old = rollouts.sampler, training.engine, training.engine.weights()

    def stale(asked: Any) -> Any:
        now = {layer: {name: value.clone() for name, value in of.items()} for layer, of in engine.weights().items()}
        engine.set_weights(old)
        try:
            return sample(asked)
        finally:
            engine.set_weights(now)

    rollouts.sampler = stale  # type: ignore[assignment]
    try:
        train(training, [rollouts.record], rollouts=rollouts)
    except LogprobDifferenceError as problem:
        return f"{training.iteration}: {problem}"
    finally:
        rollouts.close()
    return "ended"


def test_stale_weights_end_the_run(task: dict[str, Any]) -> None:
    values = with_keys(task, {"optimizer": {"type": "Adam", "params": {"lr": 0.03}}})
    said = run_ranks(with_stale_weights, 1, values)[0]
    assert "more than rollout.logprob_bound 0.1" in said and int(said.partition(":")[0]) >= 2
    assert run_ranks(with_stale_weights, 1, with_keys(values, {"rollout.logprob_bound": 0}))[0] == "ended"


def test_a_broken_reward_is_named_and_the_run_goes_on(task: dict[str, Any], tmp_path: Path) -> None:
    """One function raises, gives NaN and hangs for some answers: these have no reward of it, and say why."""
    file = task["reward_functions"][0].rpartition(":")[0]
    changes = {"reward_functions": [f"{file}:broken", f"{file}:wordy"], "reward_timeout_s": 4.0, "train_iters": 2}
    in_order = {"rollout.num_generations": 2, "rollout.shuffle": False}
    values = with_keys(task, changes, in_order, {"save": str(tmp_path / "run"), "checkpoint_factor": 2})
    run_ranks(whole_run, 1, values, timeout=240)
    lines = [json.loads(line) for line in (tmp_path / "run" / "logs" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 16 and all(line["rewards"]["wordy"] is not None for line in lines)
    said = {"3": "no three", "4": "NaN", "5": "took longer than 4 s"}
    sums = {f"{a} + {b} =": str(a + b) for a in range(5) for b in range(5)}
    for line in lines:
        kind = sums[line["prompt"]]
        fails = kind in "34" or line["prompt"] == "1 + 4 ="
        assert (line["rewards"]["broken"] is None) == fails, line
        assert not fails or said[kind] in line["failures"]["broken"]
    assert set(sums[line["prompt"]] for line in lines if "failures" in line) == set(said)


def test_a_step_whose_answers_are_all_cut_off_is_no_difference(task: dict[str, Any], tmp_path: Path) -> None:
    values = with_keys(task, {"rl_mask_truncated": True, "rollout.max_completion_length": 1, "train_iters": 3})
    run_ranks(whole_run, 1, {**values, "save": str(tmp_path / "run"), "checkpoint_factor": 3})
    assert (tmp_path / "run" / "global_step3").is_dir()


def test_long_answers_cost_reward_and_may_go_untrained(task: dict[str, Any]) -> None:
    args = NeoXArgs.from_dict(with_keys(task, {"rl_overlong_buffer": 2, "rl_mask_truncated": True}))
    answers = [Answer([1], [2] * length, [-0.5] * length, length != 4) for length in (1, 2, 3, 4)]
    assert overlong(args, answers).tolist() == [0.0, 0.0, 0.5, 1.0]
    values = [0.0] * 4
    for ended_alone, trained in ((False, [1, 2, 3, 4]), (True, [1, 2, 3, 0])):
        batch = batch_of(answers, 8, rewards=values, advantages=values, ended_alone=ended_alone)
        assert batch.loss_weights.sum(1).tolist() == trained
    seen = run_ranks(steps_of, 1, with_keys(task, {"rl_mask_truncated": True, "rl_overlong_buffer": 2}), 2)[0]
    assert all(torch.isfinite(torch.tensor([*seen.losses, *seen.norms])))


def test_a_reward_model_judges_in_every_layout(task: dict[str, Any], tmp_path: Path) -> None:
    own = ("train_impl", "dataset_impl", "rl_loss_type", "kl_div_beta", "reward_functions", "rollout")
    shape = {key: value for key, value in task.items() if key not in own}
    kind = {"train_impl": "rm", "dataset_impl": "pairwise", "pack_impl": "unpacked", "max_position_embeddings": 32}
    pairs = {"pos_train_data_paths": ["pos"], "neg_train_data_paths": ["neg"]}
    folder = tmp_path / "rm"
    judge = NeoXArgs.from_dict({**shape, **kind, **pairs, "save": str(folder), "checkpoint_factor": 1})
    tokenizer = build_tokenizer(judge)
    write_initial_weights(with_vocabulary(judge, tokenizer), tokenizer.fingerprint())
    values = with_keys(task, {"reward_model": str(folder), "reward_weights": [1.0, 0.5]})
    one = run_ranks(steps_of, 1, values, 2)[0]
    two = run_ranks(steps_of, 2, with_keys(values, {"model_parallel_size": 2}), 2)[0]
    assert one.answers == two.answers and one.losses == pytest.approx(two.losses, rel=1e-5, abs=1e-6)
    alone = run_ranks(steps_of, 1, with_keys(values, {"reward_functions": None, "reward_weights": [2.0]}), 1)[0]
    assert alone.answers[0] == one.answers[0] and alone.metrics[0]["reward"] != one.metrics[0]["reward"]


def test_experts_that_are_chosen_otherwise_in_training_are_refused(task: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="moe_router_type: chooses experts in training otherwise than in sampling"):
        NeoXArgs.from_dict(with_keys(task, {"moe_num_experts": 4}))
    topk = {"moe_num_experts": 4, "moe_router_type": "topk", "moe_top_k": 2, "rollout.exact": True}
    for metrics in run_ranks(steps_of, 1, with_keys(task, topk), 2)[0].metrics:
        assert metrics[f"{DIFFERENCE}_max"] == 0.0


def test_the_reference_of_adapters_is_the_model_without_them(task: dict[str, Any]) -> None:
    values = with_keys(task, {"lora": {"r": 4}, "kl_div_beta": 0.05, "kl_impl": "k3"})
    one = run_ranks(steps_of, 1, values)[0]
    two = run_ranks(steps_of, 2, with_keys(values, {"model_parallel_size": 2}))[0]
    assert one.metrics[0]["kl"] == pytest.approx(0.0, abs=1e-7) and one.metrics[2]["kl"] > 1e-5
    assert one.answers == two.answers and one.losses == pytest.approx(two.losses, rel=1e-5, abs=1e-7)


def steps_in_narrow_rows(rank: int, world_size: int, values: dict[str, Any]) -> Seen:
    """For the pool: steps whose rows are cut to multiples of 8 tokens, which makes many widths."""
    generation._WIDTHS = 8
    return steps_of(rank, world_size, values, 4)


@pytest.mark.parametrize(
    "layout",
    ["tp2, sp", pytest.param("pp2", marks=pytest.mark.more), pytest.param("pp2, deepspeed", marks=pytest.mark.more)],
)
def test_rows_are_as_wide_as_the_longest_answer(layout: str, task: dict[str, Any]) -> None:
    ranks, keys = LAYOUTS[layout.partition(", d")[0]]
    engine = {"engine": "deepspeed"} if "deepspeed" in layout else {}
    wide = {"seq_length": 64, "max_position_embeddings": 64, "rollout.max_completion_length": 50}
    values = with_keys(task, wide, {"train_batch_size": 4, "rollout.num_generations": 2, "kl_div_beta": 0.05})
    small = {"train_micro_batch_size_per_gpu": 2} if "pp2" in layout else {}
    one = run_ranks(steps_in_narrow_rows, 1, values)[0]
    found = run_ranks(steps_in_narrow_rows, ranks, with_keys(values, keys, engine, small))[0]
    assert len({(3 + max(map(len, answers))) // 8 for answers in one.answers}) > 1, "rows of several widths"
    assert found.answers == one.answers and found.losses == pytest.approx(one.losses, rel=1e-5, abs=1e-6)
