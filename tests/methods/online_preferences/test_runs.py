"""Online DPO: pairs of the model's own answers, by rewards or by a judge."""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatron.data import rows_per_sample
from megatron.methods.reinforcement.judging import compare
from megatron.methods.reinforcement.rewards.functions import Completion, Failure, RewardError, RewardFunctions, Scores
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives.preference import DIFFERENCE
from megatron.operations.report.run_data import read_rollouts
from megatron.process.run_files import Problems
from tests.marks import with_more
from tests.methods.reinforcement import toy
from tests.methods.reinforcement.test_resume import goes_on_bit_for_bit
from tests.methods.reinforcement.test_rollouts import LAYOUTS, in_two_ranks
from tests.methods.reinforcement.toy import StepResults, assert_same_steps, full_run, lines_of, steps_of, with_keys
from tests.pool import run_ranks

JUDGES = '''def wordier(prompts, completions):
    """The longer answer; of answers of the same length none."""
    lengths = [[len(text.split()) for text in two] for two in completions]
    return [-1 if first == second else int(second > first) for first, second in lengths]

def right(prompts, completions, answer, **columns):
    """The answer that begins with the sum."""
    good = [[text.split()[:1] == [one] for text in two] for two, one in zip(completions, answer)]
    return [None if first == second else int(second) for first, second in good]

async def first(prompts, completions):
    return [0] * len(prompts)

def silent(prompts, completions):
    return [-1 if number % 2 else None for number in range(len(prompts))]

def broken(prompts, completions):
    if any(prompt.startswith("1") for prompt in prompts):
        raise ValueError("no one")
    return [7 if prompt.startswith("2") else wordier([prompt], [two])[0] for prompt, two in zip(prompts, completions)]

def alone(prompt, completion):
    return 0
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_pairs_task(tmp_path_factory.mktemp("task"))


def write_pairs_task(folder: Path, limit: int = 5) -> dict[str, Any]:
    """The toy's task with train_impl: dpo; its file of judges lies beside."""
    (folder / "judges.py").write_text(JUDGES)
    return toy.for_pairs(toy.write_task(folder, limit), {"train_batch_size": 8, "rollout.temperature": 0.7})


def judged(task: dict[str, Any], name: str, *changes: dict[str, Any]) -> dict[str, Any]:
    folder = Path(task["rollout"]["prompts"][0]).parent
    judge = {"rollout.judge": f"{folder / 'judges.py'}:{name}", "rollout.num_generations": 2, "reward_functions": None}
    return with_keys(task, judge, *changes)


@pytest.fixture(scope="module")
def one_process(task: dict[str, Any]) -> dict[str, StepResults]:
    return {name: run_ranks(steps_of, 1, values, 4)[0] for name, values in kinds(task).items()}


def kinds(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Four answers with rewards; two that are judged, for two steps taken twice, with a loss of all pairs."""
    several = {"rollout.num_iterations": 2, "rollout.steps_per_generation": 2, "dpo_loss_type": ["aot", "sft"]}
    return {"rewards": with_keys(task, {"rollout.num_generations": 4, "rollout.missing_eos_penalty": 0.25}),
            "judge": judged(task, "wordier", several)}  # fmt: skip


COVERED = [("dp2", "judge"), ("pp2", "rewards"), ("zero3, deepspeed", "judge")]
PRODUCT = [("tp2, sp", "rewards"), ("pp2", "judge"), ("zero3", "judge"), ("zero1, deepspeed", "rewards")]


@pytest.mark.parametrize("cell", with_more([*COVERED, *PRODUCT], COVERED[-1], product=PRODUCT), ids=" ".join)
def test_layouts_equal_one_process(
    cell: tuple[str, str], task: dict[str, Any], one_process: dict[str, StepResults]
) -> None:
    layout, kind = cell
    ranks, keys = LAYOUTS[layout]
    small = {"train_micro_batch_size_per_gpu": 2} if "pp2" in layout else {}
    actual, reference = run_ranks(steps_of, ranks, with_keys(kinds(task)[kind], keys, small), 4)[0], one_process[kind]
    assert len(actual.answers[0]) == 32, "answers of a generation: 8 prompts a step, four answers or two steps"
    assert_same_steps(actual, reference)
    assert all(0.0 < metrics[f"{DIFFERENCE}_max"] < 1e-4 for metrics in actual.metrics[: 1 if kind == "judge" else 4])


@pytest.mark.product
def test_the_reference_of_adapters_is_the_model_without_them(task: dict[str, Any]) -> None:
    values = with_keys(task, {"lora": {"r": 4}, "rollout.num_generations": 4})
    results = in_two_ranks(values, close=1e-7)
    assert results.losses[0] == pytest.approx(math.log(2.0), abs=1e-6) and results.losses[2] < results.losses[0]


def test_a_run_that_is_killed_goes_on_bit_for_bit(task: dict[str, Any], tmp_path: Path) -> None:
    """The run is killed between two steps of one generation.

    After the first step log-probabilities differ from the sampler's. The file has the better of two judged
    answers as chosen, and a report shows it.
    """
    several = {"rollout.steps_per_generation": 2, "rollout.logprob_bound": 1e-5}
    values = judged(task, "wordier", several, {"train_iters": 4, "checkpoint_factor": 1})
    goes_on_bit_for_bit(values, tmp_path)
    lines = lines_of(tmp_path / "run")
    for first_line, second_line in zip(lines[::2], lines[1::2], strict=True):
        extra_words = len(first_line["completion"].split()) - len(second_line["completion"].split())
        expected = (0, 0) if extra_words == 0 else (1, -1) if extra_words > 0 else (-1, 1)
        assert (first_line["advantage"], second_line["advantage"]) == expected
        assert (first_line["reward"] is None) == (extra_words == 0)
    assert {line["advantage"] for line in lines} == {-1, 0, 1}
    metrics = lines_of(tmp_path / "run", "metrics")
    untrained = sum(line["advantage"] == 0 for line in lines[:32]) / 32
    assert metrics[0]["train/frac_reward_zero_std"] == pytest.approx(untrained)
    assert metrics[0]["train/reward_margin"] == 1.0 and metrics[0]["train/reward"] == pytest.approx(0.5)
    assert metrics[1][f"train/{DIFFERENCE}"] > 1e-5 > metrics[2][f"train/{DIFFERENCE}"]
    generation = json.loads((tmp_path / "run" / "logs" / "generations" / "1.json").read_text())
    assert generation["old_logprobs"] is None, "nothing reads them"
    assert rows_per_sample(NeoXArgs.from_dict(values)) == 2
    step_rollouts = read_rollouts(tmp_path / "run" / "logs", Problems())[0]
    assert step_rollouts.best is not None and step_rollouts.worst is not None
    assert (step_rollouts.best.reward, step_rollouts.mean, step_rollouts.worst.reward) == (1.0, 0.5, 0.0)


def test_failures_of_a_judge_are_named_and_places_teach_nothing(task: dict[str, Any], tmp_path: Path) -> None:
    """A pair on which it raises, gives no verdict, or says nothing, is not trained. One that always takes the
    first answer is shown either first, and teaches neither place."""
    for name in ("broken", "first", "silent"):
        values = judged(task, name, {"train_iters": 2, "save": str(tmp_path / name), "checkpoint_factor": 2})
        run_ranks(full_run, 1, {**values, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 16})
    reasons = {"1": "ValueError: no one", "2": "returned 7, not a verdict"}
    pairs = list(zip(*[iter(lines_of(tmp_path / "broken"))] * 2, strict=True))
    assert len(pairs) == 32
    for first_line, second_line in pairs:
        reason = reasons.get(first_line["prompt"][0])
        assert (reason is None) == ("failures" not in first_line) and "failures" not in second_line
        if reason is not None:
            assert reason in first_line["failures"]["broken"]
            assert first_line["reward"] is None and first_line["advantage"] == second_line["advantage"] == 0
    assert all(line["reward"] is None and "failures" not in line for line in lines_of(tmp_path / "silent"))
    lines = lines_of(tmp_path / "first")
    assert 4 < sum(line["reward"] for line in lines[::2]) < 28 and all(line["reward"] in (0, 1) for line in lines)


def judge_of(task: dict[str, Any], name: str) -> RewardFunctions:
    return RewardFunctions([judged(task, name)["rollout"]["judge"]], timeout_s=5.0, pairwise=True)


def test_verdicts_do_not_depend_on_the_order(task: dict[str, Any]) -> None:
    """By a function of the texts alone, which is given the columns where it asks for them."""
    texts = [("3 a", "4"), ("4", "3"), ("a", "b"), ("3 3", "3")]
    completions = [Completion("1 + 2 =", text, [1], {"answer": "3"}) for pair in texts for text in pair]
    with closing(judge_of(task, "right")) as judge:
        judge.check()
        for swapped in ([False] * 4, [True] * 4, [True, False, False, True]):
            result = compare(completions, swapped, judge.score)
            assert result.parts == {"right": [1.0, 0.0, 0.0, 1.0, None, None, None, None]} and not result.failures
    failed = Scores({"j": [None, 0.0, 1.0, 1.0]}, [Failure("j", 1, "why"), Failure("j", None, "all")])
    result = compare(completions, [False, True, False, True], lambda pairs: failed)
    assert result.parts == {"j": [None, None, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]}
    assert [failure.row for failure in result.failures] == [2, None]


def test_a_judge_that_cannot_be_asked_is_refused(task: dict[str, Any]) -> None:
    with closing(judge_of(task, "alone")) as judge:
        with pytest.raises(RewardError, match=r"alone: .*alone\(prompts, completions\)"):
            judge.check()
    with pytest.raises(RewardError, match="json: .*FILE.py:NAME"):
        RewardFunctions(["json"], timeout_s=1.0, pairwise=True)


@pytest.mark.parametrize("changes,message", [
    ({"rollout.judge": "j.py:judge"}, "reward_functions: .*rollout.judge "),
    ({"reward_functions": None}, "reward_functions: .* rollout.environment or rollout.judge"),
    ({"rollout.judge": "j.py:judge", "reward_functions": None}, "rollout.num_generations: rollout.judge .* 2"),
    ({"rollout.num_generations": 1}, "rollout.num_generations: .* 2 or more"),
    ({"rollout.exact": True}, "rollout.num_generations: .* two answers"),
    ({"rollout.temperature": 0}, "rollout.temperature: "),
    ({"rollout.servers": ["http://a:1"], "save": "s"}, "rollout.logprob_bound: "),
    ({"rl_epsilon": 0.1}, "rl_epsilon: .*reinforce .*dpo"),
    ({"kl_div_beta": 0.0}, "kl_div_beta: .*reinforce .*dpo"),
    ({"dataset_impl": "pairwise"}, "rollout: .*online.* pairwise"),
    ({"dpo_reference": "cache"}, "dpo_reference: cache "),
    ({"prefix_sharing": False}, "prefix_sharing: "),
    ({"train_impl": "kto"}, "dataset_impl: online .*reinforce or dpo, not kto"),
    ({"train_impl": "reinforce", "rollout.judge": "j.py:judge"}, "rollout.judge: "),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str, task: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        NeoXArgs.from_dict(with_keys(task, {"rollout.num_generations": 4}, changes))


@pytest.mark.parametrize("method", with_more(["judge", "rewards"], "judge", product=["rewards"]))
def test_answers_are_better_in_the_end(method: str, tmp_path: Path) -> None:
    """Right answers, as the judge or the reward alone tells; the control is the run's own beginning."""
    task, keys = write_pairs_task(tmp_path, limit=2), {"rollout.max_completion_length": 1, "rollout.temperature": 1.0}
    keys |= {**toy.LEARNS, "train_batch_size": 32}
    functions = {"reward_functions": [f"{tmp_path / 'rewards.py'}:right"], "rollout.num_generations": 4}
    values = judged(task, "right", keys) if method == "judge" else with_keys(task, keys, functions)
    score_before, score_after = toy.learned(values, tmp_path / "run", toy.is_right)
    assert score_after > score_before + 0.5, (score_before, score_after)
