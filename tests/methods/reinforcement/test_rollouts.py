"""Training with rewards: the same steps in every layout, and no difference between sampler and trainer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatron.checkpointing.initial_weights import write_initial_weights
from megatron.methods.reinforcement import generation
from megatron.methods.reinforcement.answers import Answer, batch_of
from megatron.methods.reinforcement.generation import penalties
from megatron.methods.reinforcement.record import LogprobDifferenceError
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives.preference import DIFFERENCE
from megatron.tokenizer import build_tokenizer, with_vocabulary
from megatron.training import train
from tests.marks import with_more
from tests.methods.reinforcement import toy
from tests.methods.reinforcement.toy import (
    StepResults,
    assert_same_steps,
    full_run,
    started_run,
    steps_of,
    with_keys,
    write_task,
)
from tests.pool import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}), "tp2, sp": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 4}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "zero1, deepspeed": (2, {"zero_optimization": {"stage": 1}, "engine": "deepspeed"}),
    "zero3, deepspeed": (2, {"zero_optimization": {"stage": 3}, "engine": "deepspeed"}),
}  # fmt: skip
LOSSES: dict[str, dict[str, Any]] = {
    "grpo, kl": {"rl_loss_type": "grpo", "kl_div_beta": 0.05, "kl_impl": "k3"},
    "rloo, kl in reward": {"rl_loss_type": "rloo", "kl_div_beta": 0.05, "kl_impl": "kl", "rl_kl_in_reward": True},
    "reinforce, whole kl": {"rl_loss_type": "reinforce", "kl_div_beta": 0.05, "kl_impl": "full"},
    "dapo, two epochs": {"rl_loss_type": "dapo", "rollout.num_iterations": 2, "rollout.steps_per_generation": 2},
}
STEPS = {"grpo, kl": 2, "dapo, two epochs": 4}
LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {"rl_loss_type": "grpo"},
    "rloo": {"rl_loss_type": "rloo", "kl_div_beta": 0.01, "kl_impl": "kl", "rl_kl_in_reward": True},
    "reinforce": {"rl_loss_type": "reinforce"},
    "leave one out": {"rl_loss_type": "reinforce", "reinforce_leave_one_out": True},
    "dapo": {"rl_loss_type": "dapo", "rl_epsilon_high": 0.28, "rollout.num_iterations": 2, "train_iters": 120},
    "gspo": {"rl_loss_type": "gspo"}, "cispo": {"rl_loss_type": "cispo", "rl_epsilon_high": 5.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def one_process(task: dict[str, Any]) -> dict[str, StepResults]:
    return {name: run_ranks(steps_of, 1, with_keys(task, LOSSES[name]), steps)[0] for name, steps in STEPS.items()}


# Each loss with each kind of layout, each layout with a loss.
COVERED = [("dp2", "dapo, two epochs"), ("pp2", "grpo, kl"), ("tp2, sp", "dapo, two epochs"), ("zero3", "grpo, kl")]
MORE_CELLS = [("zero1, deepspeed", "grpo, kl"), ("zero3, deepspeed", "dapo, two epochs")]
PRODUCT = {(layout, loss) for layout in LAYOUTS for loss in STEPS} - {*COVERED, *MORE_CELLS}


@pytest.mark.parametrize(
    "cell", with_more([*COVERED, *MORE_CELLS, *sorted(PRODUCT)], *MORE_CELLS, product=PRODUCT), ids=" ".join
)
def test_layouts_equal_one_process(
    cell: tuple[str, str], task: dict[str, Any], one_process: dict[str, StepResults]
) -> None:
    layout, loss = cell
    ranks, keys = LAYOUTS[layout]
    assert_same_steps(
        run_ranks(steps_of, ranks, with_keys(task, LOSSES[loss], keys), STEPS[loss])[0], one_process[loss]
    )


def in_two_ranks(values: dict[str, Any], steps: int = 3, close: float = 1e-6) -> StepResults:
    """The steps of one process, which those of two tensor ranks are."""
    one_rank, two_ranks = (
        run_ranks(steps_of, n, with_keys(values, {"model_parallel_size": n}), steps)[0] for n in (1, 2)
    )
    assert one_rank.answers == two_ranks.answers and one_rank.losses == pytest.approx(
        two_ranks.losses, rel=1e-5, abs=close
    )
    return one_rank


def test_no_two_micro_batches_drop_the_same_places(one_process: dict[str, StepResults]) -> None:
    seeds = one_process["dapo, two epochs"].seeds
    assert len(set(seeds)) == len(seeds) >= 3


@pytest.mark.parametrize("loss", ["rloo, kl in reward", "reinforce, whole kl"])
def test_other_losses_in_two_ranks(loss: str, task: dict[str, Any]) -> None:
    metrics = in_two_ranks(with_keys(task, LOSSES[loss]), 2).metrics
    assert metrics[-1]["kl"] != 0.0 and metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("layout", with_more(["tp2, sp", "pp2", "zero3"], product=["zero3"]))
def test_exact_sampling_differs_by_nothing(layout: str, task: dict[str, Any]) -> None:
    ranks, keys = LAYOUTS[layout]
    values = with_keys(task, keys, {"rollout.exact": True, "rollout.temperature": 0.7})
    for results in run_ranks(steps_of, ranks, values, 2):
        for metrics in results.metrics:
            assert metrics[DIFFERENCE] == 0.0 and metrics[f"{DIFFERENCE}_max"] == 0.0


def test_the_engine_s_sampling_differs_by_rounding_and_exact_sampling_by_nothing(task: dict[str, Any]) -> None:
    exact, engine_sampled = (
        run_ranks(steps_of, 1, with_keys(task, {"rollout.exact": exact, "rollout.temperature": 0.7}))[0]
        for exact in (True, False)
    )
    assert all(metrics[f"{DIFFERENCE}_max"] == 0.0 for metrics in exact.metrics)
    assert all(0.0 < metrics[f"{DIFFERENCE}_max"] < 1e-4 for metrics in engine_sampled.metrics)
    assert engine_sampled.answers == exact.answers and engine_sampled.losses == pytest.approx(
        exact.losses, rel=1e-5, abs=1e-6
    )


def with_stale_weights(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: a run whose sampler answers by the weights of its beginning."""
    with started_run(values) as (training, rollouts):
        sample, engine, old = rollouts.sampler, training.engine, training.engine.weights()

        def stale(requests: Any) -> Any:
            now = {
                layer: {name: value.clone() for name, value in tensors.items()}
                for layer, tensors in engine.weights().items()
            }
            engine.set_weights(old)
            try:
                return sample(requests)
            finally:
                engine.set_weights(now)

        rollouts.sampler = stale  # type: ignore[assignment]
        try:
            train(training)
        except LogprobDifferenceError as problem:
            return f"{training.iteration}: {problem}"
    return "ended"


def test_stale_weights_end_the_run(task: dict[str, Any]) -> None:
    values = with_keys(task, {"optimizer": {"type": "Adam", "params": {"lr": 0.03}}})
    outcome = run_ranks(with_stale_weights, 1, values)[0]
    assert "rollout.logprob_bound 0.1" in outcome and int(outcome.partition(":")[0]) >= 2
    assert run_ranks(with_stale_weights, 1, with_keys(values, {"rollout.logprob_bound": 0}))[0] == "ended"


def test_a_step_whose_answers_are_all_cut_off_is_no_difference(task: dict[str, Any], tmp_path: Path) -> None:
    """The step's tokens count all the same, by the rows as truncated."""
    values = with_keys(task, {"rl_mask_truncated": True, "rollout.max_completion_length": 1, "train_iters": 3})
    run_ranks(in_narrow_rows, 1, full_run, {**values, "save": str(tmp_path / "run"), "checkpoint_factor": 3})
    assert (tmp_path / "run" / "global_step3").is_dir()
    rows = [row["consumed_tokens"] for row in toy.lines_of(tmp_path / "run", "metrics") if row["iteration"]]
    assert rows == [16 * 8, 32 * 8, 48 * 8]


def in_narrow_rows(rank: int, world_size: int, run: Callable[..., Any], *arguments: Any) -> Any:
    """For the pool: a run whose rows are cut to multiples of 8 tokens, which makes many widths."""
    generation._WIDTH_MULTIPLE = 8
    return run(rank, world_size, *arguments)


def test_long_answers_cost_reward_and_may_go_untrained(task: dict[str, Any]) -> None:
    args = NeoXArgs.from_dict(with_keys(task, {"rl_overlong_buffer": 2, "rl_mask_truncated": True}))
    answers = [Answer([1], [2] * length, [-0.5] * length, length != 4) for length in (1, 2, 3, 4)]
    assert penalties(args, answers).tolist() == [0.0, 0.0, 0.5, 1.0]
    args = NeoXArgs.from_dict(with_keys(task, {"rollout.missing_eos_penalty": 0.25}))
    assert penalties(args, answers).tolist() == [0.0, 0.0, 0.0, 0.25]
    args = NeoXArgs.from_dict(with_keys(task, LOSSES["rloo, kl in reward"]))
    assert penalties(args, answers, np.array([2.0, 0.0, -1.0, 4.0])).tolist() == [0.1, 0.0, -0.05, 0.2]
    values = [0.0] * 4
    for finished_only, trained in ((False, [1, 2, 3, 4]), (True, [1, 2, 3, 0])):
        batch = batch_of(answers, 8, rewards=values, advantages=values, finished_only=finished_only)
        assert batch.loss_weights.sum(1).tolist() == trained
    results = run_ranks(steps_of, 1, with_keys(task, {"rl_mask_truncated": True, "rl_overlong_buffer": 2}), 2)[0]
    assert all(torch.isfinite(torch.tensor([*results.losses, *results.norms])))


@pytest.fixture(scope="module")
def judge(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a reward model, as it is initialised."""
    run_keys = ("train_impl", "dataset_impl", "rl_loss_type", "kl_div_beta", "reward_functions", "rollout")
    shape = {key: value for key, value in task.items() if key not in run_keys}
    kind = {"train_impl": "rm", "dataset_impl": "pairwise", "pack_impl": "unpacked", "max_position_embeddings": 32}
    pairs = {"pos_train_data_paths": ["pos"], "neg_train_data_paths": ["neg"]}
    folder = tmp_path_factory.mktemp("judge") / "rm"
    args = NeoXArgs.from_dict({**shape, **kind, **pairs, "save": str(folder), "checkpoint_factor": 1})
    tokenizer = build_tokenizer(args)
    write_initial_weights(with_vocabulary(args, tokenizer), tokenizer.fingerprint())
    return str(folder)


def test_a_reward_model_judges_in_every_layout(task: dict[str, Any], judge: str) -> None:
    values = with_keys(task, {"reward_model": judge, "reward_weights": [1.0, 0.5]})
    expected = in_two_ranks(values, 2)
    model_only = run_ranks(steps_of, 1, with_keys(values, {"reward_functions": None, "reward_weights": [2.0]}), 1)[0]
    assert (
        model_only.answers[0] == expected.answers[0]
        and model_only.metrics[0]["reward"] != expected.metrics[0]["reward"]
    )


@pytest.mark.more
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_reward_model_judges_with_virtual_stages(schedule: str, task: dict[str, Any], judge: str) -> None:
    """A reward model of two blocks runs with one stage on each rank."""
    values = with_keys(task, {"reward_model": judge, "num_layers": 4})
    layout = {"pipe_parallel_size": 2, "pipeline_schedule": schedule, "train_micro_batch_size_per_gpu": 4}
    expected, actual = (run_ranks(steps_of, n, with_keys(values, keys), 2)[0] for n, keys in ((1, {}), (2, layout)))
    assert_same_steps(actual, expected)


def test_a_reward_model_of_other_tokens_is_refused(task: dict[str, Any], tmp_path: Path) -> None:
    """HuggingFace's, of as many tokens."""
    config = transformers.LlamaConfig(
        vocab_size=len(toy.WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_labels=1, eos_token_id=0, pad_token_id=0)  # fmt: skip
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": toy.WORDS[0]}))
    tokens = json.loads(Path(task["vocab_file"]).read_text())
    values = with_keys(task, {"reward_model": str(tmp_path), "make_vocab_size_divisible_by": 1})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))  # the same in other bytes
    run_ranks(steps_of, 1, values, 0)
    tokens["model"]["vocab"] |= {"a": toy.WORDS.index("b"), "b": toy.WORDS.index("a")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(AssertionError, match="reward_model: .* another tokenizer .*vocab_file"):
        run_ranks(steps_of, 1, values, 0)


def judged_by_a_damaged_model(rank: int, world_size: int, values: dict[str, Any], word: int) -> list[dict[str, Any]]:
    """For the pool: the lines and then the metrics of two steps, whose reward model has NaN for a word."""
    with started_run(values) as (training, rollouts):
        assert rollouts.reward_model is not None
        for name, weight in rollouts.reward_model.model.stage.named_parameters():
            if "word_embeddings" in name:
                weight.data[word] = torch.nan
        train(training)
    return [*toy.lines_of(Path(values["save"])), *toy.lines_of(Path(values["save"]), "metrics")]


def test_scores_that_are_no_numbers_are_failures(task: dict[str, Any], judge: str, tmp_path: Path) -> None:
    """A function's missing reward is a failure too; the run goes on with the other rewards."""
    functions = [task["reward_functions"][0].replace("wordy", name) for name in ("broken", "wordy")]
    keys = {"reward_model": judge, "reward_functions": functions, "rollout.shuffle": False, "train_iters": 2,
            "save": str(tmp_path / "run"), "checkpoint_factor": 2}  # fmt: skip
    word = toy.WORDS.index("b")
    rows = run_ranks(judged_by_a_damaged_model, 1, with_keys(task, keys), word)[0]
    lines, metrics = rows[:32], [row for row in rows[32:] if "train/reward" in row]
    for line in lines:
        failed, sum_is_three = word in line["tokens"], line["prompt"] in ("0 + 3 =", "1 + 2 =", "2 + 1 =", "3 + 0 =")
        assert (line["rewards"]["reward_model"] is None) == failed and line["rewards"]["wordy"] is not None
        assert (line["rewards"]["broken"] is None) == sum_is_three
        reasons = {**line.get("failures", {})}
        assert ("no three" in reasons.pop("broken", "")) == sum_is_three
        assert list(reasons) == (["reward_model"] if failed else []) and all("NaN" in text for text in reasons.values())
    failures = [sum(len(line.get("failures", {})) for line in lines[start : start + 16]) for start in (0, 16)]
    assert [row["train/rewards/failures"] for row in metrics] == failures and 8 < sum(failures) < 40
    for row in metrics:
        shares = [row[f"train/time/{part}_share"] for part in ("sampling", "judging", "training")]
        assert min(shares) > 0 and sum(shares) == pytest.approx(1.0)


def test_experts_that_are_chosen_otherwise_in_training_are_refused(task: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="moe_router_type: "):
        NeoXArgs.from_dict(with_keys(task, {"moe_num_experts": 4}))
    topk = {"moe_num_experts": 4, "moe_router_type": "topk", "moe_top_k": 2, "rollout.exact": True}
    for metrics in run_ranks(steps_of, 1, with_keys(task, topk), 2)[0].metrics:
        assert metrics[f"{DIFFERENCE}_max"] == 0.0


@pytest.mark.more
def test_experts_in_two_ranks_answer_and_learn_as_in_one(task: dict[str, Any]) -> None:
    topk = {"moe_num_experts": 4, "moe_router_type": "topk", "moe_top_k": 2, "expert_parallel_size": 2}
    one_rank = run_ranks(steps_of, 1, with_keys(task, topk, {"expert_parallel_size": 1}))[0]
    for layout in ({"expert_parallel_size": 1}, {}):
        two_ranks = run_ranks(steps_of, 2, with_keys(task, topk, layout))[0]
        assert two_ranks.answers == one_rank.answers
        assert two_ranks.losses == pytest.approx(one_rank.losses, rel=1e-5, abs=1e-6)
        assert two_ranks.norms == pytest.approx(one_rank.norms, rel=1e-4)


@pytest.mark.parametrize("precision", with_more(["bfloat16", "fp16"], "bfloat16", product=["fp16"]))
def test_sixteen_bit_runs_stay_below_the_bound(precision: str, task: dict[str, Any]) -> None:
    values = with_keys(task, {"precision": precision, "rollout.temperature": 0.7, "kl_div_beta": 0.05})
    differences = [metrics[DIFFERENCE] for metrics in run_ranks(steps_of, 1, values, 6)[0].metrics]
    assert 0.0 < max(differences) < 0.01, "a tenth of rollout.logprob_bound"


def test_the_reference_of_adapters_is_the_model_without_them(task: dict[str, Any]) -> None:
    values = with_keys(task, {"lora": {"r": 4}, "kl_div_beta": 0.05, "kl_impl": "k3"})
    metrics = in_two_ranks(values, close=1e-7).metrics
    assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-7) and metrics[2]["kl"] > 1e-5


@pytest.mark.parametrize("layout", with_more(["tp2, sp", "pp2", "pp2, deepspeed"], product=["pp2, deepspeed", "pp2"]))
def test_rows_are_as_wide_as_the_longest_answer(layout: str, task: dict[str, Any]) -> None:
    ranks, keys = LAYOUTS[layout.partition(", d")[0]]
    engine = {"engine": "deepspeed"} if "deepspeed" in layout else {}
    wide = {"seq_length": 64, "max_position_embeddings": 64, "rollout.max_completion_length": 50}
    values = with_keys(task, wide, {"train_batch_size": 4, "rollout.num_generations": 2, "kl_div_beta": 0.05})
    small = {"train_micro_batch_size_per_gpu": 2} if "pp2" in layout else {}
    one_rank = run_ranks(in_narrow_rows, 1, steps_of, values, 4)[0]
    actual = run_ranks(in_narrow_rows, ranks, steps_of, with_keys(values, keys, engine, small), 4)[0]
    assert len({(3 + max(map(len, answers))) // 8 for answers in one_rank.answers}) > 1, "rows of several widths"
    assert actual.answers == one_rank.answers and actual.losses == pytest.approx(one_rank.losses, rel=1e-5, abs=1e-6)


@pytest.mark.product
@pytest.mark.parametrize("name", LEARNERS)
def test_rewards_alone_teach_sums(name: str, tmp_path: Path) -> None:
    """The run learns more than a control of the same seed, whose rewards are those of other answers.

    Right answers are read from the texts, since the control sees rewards of other answers.
    """
    scores = {}
    for function in ("right", "shuffled"):
        (folder := tmp_path / function).mkdir()
        run_keys = {"rollout.num_generations": 8, "rollout.max_completion_length": 1}
        run_keys |= {"reward_functions": [f"{folder / 'rewards.py'}:{function}"], **LEARNERS[name]}
        values = with_keys(write_task(folder, 3), toy.LEARNS, run_keys)
        _, scores[function] = toy.learned(values, folder / "run", toy.is_right)
    # Seen of grpo: 0.76 and 0.04
    assert scores["right"] > scores["shuffled"] + (0.5 if name == "grpo" else 0.3), scores
