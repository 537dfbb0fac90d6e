"""Conversations with environments: the same in every layout; what environments say is not trained."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron.data.labels import MASKED
from megatron.methods.reinforcement import conversations
from megatron.methods.reinforcement.answers import Answer, row_of
from megatron.methods.reinforcement.conversations import Conversation, Speech, opening
from megatron.methods.reinforcement.environments.environments import Outcome
from megatron.methods.reinforcement.objective import DIFFERENCE
from megatron.methods.reinforcement.prompts import Prompt, PromptRow
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.marks import with_more
from tests.methods.reinforcement import toy
from tests.methods.reinforcement.test_rollouts import LAYOUTS, task
from tests.methods.reinforcement.toy import (
    StepResults,
    assert_same_steps,
    full_run,
    learned,
    lines_of,
    steps_of,
    with_keys,
    write_task,
)
from tests.pool import run_ranks

__all__ = ["task"]  # the fixture
# Short turns of a model that knows nothing, so that many conversations have two of them.
KEYS: dict[str, Any] = {"seq_length": 32, "max_position_embeddings": 32, "reward_functions": None,
                        "rollout.max_completion_length": 24}  # fmt: skip


def with_environment(task: dict[str, Any], changes: dict[str, Any], name: str = "Sums") -> dict[str, Any]:
    file = Path(task["vocab_file"]).with_name("environments.py")
    return with_keys(task, KEYS, {"rollout.environment": f"{file}:{name}"}, changes)


@pytest.fixture(scope="module")
def one_process(task: dict[str, Any]) -> StepResults:
    return run_ranks(steps_of, 1, with_environment(task, {}))[0]


def test_what_the_environment_says_is_a_label_nowhere() -> None:
    row = row_of(Answer([5, 6], [1, 2, 3, 4], [0.0] * 4, True, [True, False, False, True]), 8)
    assert row.tokens.tolist() == [5, 6, 1, 2, 3, 4, 0, 0, 0]
    assert np.flatnonzero(row.labels != MASKED).tolist() == [2, 5]


def test_sampler_and_trainer_agree_over_turns(one_process: StepResults, task: dict[str, Any]) -> None:
    assert all(0 < metrics[f"{DIFFERENCE}_max"] < 1e-4 for metrics in one_process.metrics)
    exact = run_ranks(steps_of, 1, with_environment(task, {"rollout.exact": True}))[0]
    assert all(metrics[f"{DIFFERENCE}_max"] == 0.0 for metrics in exact.metrics)
    assert exact.answers == one_process.answers


@pytest.mark.parametrize("layout", with_more(["dp2", "pp2", "tp2, sp", "zero3"], product=["pp2", "tp2, sp", "zero3"]))
def test_layouts_equal_one_process(layout: str, task: dict[str, Any], one_process: StepResults) -> None:
    ranks, keys = LAYOUTS[layout]
    assert_same_steps(run_ranks(steps_of, ranks, with_environment(task, keys))[0], one_process)


def test_a_run_and_failures_that_are_named(task: dict[str, Any], tmp_path: Path) -> None:
    """A conversation stands in rollouts.jsonl as it was held."""
    keys = {"train_iters": 2, "train_batch_size": 32, "save": str(tmp_path), "checkpoint_factor": 2}
    values = with_environment(task, keys, "Broken")
    run_ranks(full_run, 1, values)
    rows = lines_of(tmp_path)
    assert len(rows) == 64
    words = {"raised": 0, "ended": 0, "went on": 0, "over": 0}
    for row in rows:
        model = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        inserted = sum(not is_trained for is_trained in row["loss_mask"])
        assert len(row["loss_mask"]) == len(row["tokens"]) and inserted == 3 * (len(row["messages"]) - len(model))
        if "7" in " ".join(model):
            words["raised"] += 1
            assert row["failures"]["environment"].startswith("ValueError: seven (environments.py:")
        elif "8" in " ".join(model):
            words["ended"] += 1
            assert row["failures"] == {"environment": "its process ended"}
        elif row["finished"]:
            words["over"] += 1
            assert len(model) == 2 and row["reward"] == row["rewards"]["environment"]
        assert (row["reward"] is None) == ("failures" in row)
        words["went on"] += len(model) == 2
    assert all(count > 2 for count in words.values()), words
    metrics = [row for row in lines_of(tmp_path, "metrics") if "train/lm_loss" in row]
    assert all(row["train/rewards/failures"] > 0 for row in metrics)
    assert any(1 < row["train/completions/mean_turns"] < 2 for row in metrics)


def test_a_chat_with_a_tool(task: dict[str, Any], tmp_path: Path) -> None:
    """Rows are the template's text of all messages, where the model ends its turns.

    Turns have a limit. Functions judge beside the environment, whose rewards of None count as 0.
    """
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ {'user': 'a', 'assistant': '=', 'tool': 'c'}[m.role] }} {{ m.content }}"
        "{% if m.role == 'assistant' %} <eod>{% endif %} {% endfor %}{% if add_generation_prompt %}= {% endif %}"
    )
    (tmp_path / "beside.py").write_text(
        "def said(prompts, completions, **columns):\n"
        "    assert all(prompt[-1] == {'role': 'user', 'content': 'b'} for prompt in prompts)\n"
        "    return [sum(one['role'] == 'assistant' for one in messages) for messages in completions]\n"
    )
    keys = {"train_iters": 2, "save": str(tmp_path), "checkpoint_factor": 2,
            "chat_template": str(tmp_path / "chat.jinja"), "rollout.chat": True, "rollout.max_turns": 2,
            "reward_functions": [f"{tmp_path / 'beside.py'}:said"], "reward_weights": [0.5, 2.0],
            "train_batch_size": 32}  # fmt: skip
    run_ranks(full_run, 2, with_environment(task, keys, "Talk"))
    rows, tokenizer = lines_of(tmp_path), Tokenizer.from_file(task["vocab_file"])
    template = jinja2.Environment().from_string((tmp_path / "chat.jinja").read_text())
    turns = [sum(message["role"] == "assistant" for message in row["messages"]) for row in rows]
    assert max(turns) == 2 and min(turns) == 1
    for row, count in zip(rows, turns, strict=True):
        assert "failures" not in row and not row["finished"] and row["rewards"]["said"] == count
        assert row["rewards"]["environment"] == sum(
            "1" in message["content"] for message in row["messages"] if message["role"] == "assistant"
        )
        assert row["reward"] == 0.5 * count + 2.0 * row["rewards"]["environment"]
        full_ids = tokenizer.encode(template.render(messages=[*row["prompt"], *row["messages"]])).ids
        row_of_run = tokenizer.encode(template.render(messages=row["prompt"], add_generation_prompt=True)).ids
        row_of_run += row["tokens"]
        if "<eod>" not in "".join(message["content"] for message in row["messages"]):
            assert full_ids[: len(row_of_run)] == row_of_run


def test_what_the_template_leaves_out_ends_the_run(task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages if m.role != 'tool' %}{{ m.content }} {% endfor %}{{ '=' if add_generation_prompt }}"
    )
    keys = {"chat_template": str(tmp_path / "chat.jinja"), "rollout.chat": True}
    with pytest.raises(AssertionError, match="all 16 conversations failed, .*message 1 .tool.*"):
        run_ranks(steps_of, 1, with_environment(task, keys, "Deaf"))


@pytest.mark.parametrize("source", ["step", "reset"])
def test_a_flood_is_not_tokenised(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MB where 50 tokens have room: the conversation is over, as after any observation that is too
    long."""
    monkeypatch.setattr(conversations, "room_for", lambda run, prompt: 50)
    read: list[int] = []

    def tokenize(text: str) -> list[int]:
        read.append(len(text))
        return list(text.encode())

    tokenizer = SimpleNamespace(tokenize=tokenize, tokenize_bare=tokenize, detokenize=lambda ids: "a")
    args = SimpleNamespace(seed=1, seq_length=64, rollout={"max_turns": 9, "max_prompt_length": 8})
    flood = "x" * 10_000_000
    environment = SimpleNamespace(
        reset=lambda *_: flood if source == "reset" else None, step=lambda *_: Outcome(flood, 1.0, False),
        finish=lambda: None, close=lambda: None,
    )  # fmt: skip
    speech = Speech(SimpleNamespace(args=args, tokenizer=tokenizer), None, [0])  # type: ignore[arg-type]
    prompt = Prompt(0, PromptRow("p", {}, "f:1"), [1])
    conversation = Conversation(speech, SimpleNamespace(open=lambda: environment), (prompt, 0))  # type: ignore[arg-type]
    conversation.begin()
    if source == "step":
        conversation.take(Answer([1], [5, 0], [0.0, 0.0], True))
    answer = conversation.answer
    assert answer is not None and answer.transcript is not None and not answer.finished
    assert sum(read) < 10_000 and bool(answer.transcript.failure) == (source == "reset")
    assert source == "step" or "seq_length 64" in str(answer.transcript.failure)


def test_what_fits_is_not_taken_for_a_flood() -> None:
    """Tokens of a thousand characters."""
    tokenizer = SimpleNamespace(tokenize_bare=lambda text: [0] * (len(text) // 1000))
    speech = Speech(SimpleNamespace(tokenizer=tokenizer), None, [0])  # type: ignore[arg-type]
    assert not speech.exceeds("x" * 90_000, 100)
    assert not speech.exceeds("x", 0) and not speech.exceeds("x" * 100, -1), "no room: found by its tokens"
    assert speech.exceeds([{"role": "tool", "content": "x" * 900_000}], 100)


def test_pairs_of_conversations(task: dict[str, Any], tmp_path: Path) -> None:
    """For online DPO: one that failed is not half of a pair, whatever other judges gave it."""
    file = Path(task["vocab_file"]).with_name("rewards.py")
    keys = {"train_batch_size": 16, "train_iters": 1, "save": str(tmp_path), "checkpoint_factor": 2,
            "reward_functions": [f"{file}:lengths"]}  # fmt: skip
    values = with_environment(toy.for_pairs(task), keys, "Broken")
    run_ranks(full_run, 1, values)
    rows = lines_of(tmp_path)
    failed = [row for row in rows if "failures" in row]
    assert len(rows) == 64 and len(failed) > 8 and all(row["rewards"]["lengths"] is not None for row in failed)
    assert not any(row["advantage"] for row in failed) and any(row["advantage"] == 1 for row in rows)
    with pytest.raises(ConfigError, match="dpo_loss_type: orpo "):
        NeoXArgs.from_dict({**values, "dpo_loss_type": "orpo"})


@pytest.mark.parametrize(("prompt", "observation", "expected"), [
    ("a", None, "a"),
    ("a", "b", "ab"),
    ([{"role": "user", "content": "a"}], "b", [{"role": "user", "content": "ab"}]),
    ([{"role": "user", "content": "a"}], [{"role": "x", "content": "b"}],
     [{"role": "user", "content": "a"}, {"role": "x", "content": "b"}]),
])  # fmt: skip
def test_what_reset_returns_is_part_of_the_prompt(prompt: Any, observation: Any, expected: Any) -> None:
    assert opening(prompt, observation) == expected


@pytest.mark.parametrize(
    ("prompt", "observation"), [("a", [{"role": "user", "content": "b"}]), ([{"role": "user"}], "b")]
)
def test_what_reset_may_not_return(prompt: Any, observation: Any) -> None:
    with pytest.raises(ValueError, match="return a text|return messages"):
        opening(prompt, observation)


@pytest.mark.product
def test_both_turns_are_learned(tmp_path: Path) -> None:
    """The control is the same run before it has learned: one right turn is half a point."""
    keys = {"seq_length": 16, "rollout.num_generations": 8, "rollout.max_completion_length": 8, "train_iters": 120}
    values = with_environment(write_task(tmp_path, 2), {**toy.LEARNS, **keys, "max_position_embeddings": 16}, "Words")
    reward_before, reward_after = learned(values, tmp_path / "run", lambda line: line["reward"])
    assert reward_after > reward_before + 0.55, (reward_before, reward_after)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"rollout.environment": None}, "reward_functions: .*rollout.environment"),
    ({"rollout.environment": None, "rollout.max_turns": 3}, "rollout.max_turns: .*rollout.environment"),
    ({"reward_weights": [1.0, 2.0]}, "reward_weights: .* 1 .*:Sums, .* 2"),
])  # fmt: skip
def test_what_configurations_ask_for_in_vain(changes: dict[str, Any], reason: str, task: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=reason):
        NeoXArgs.from_dict(with_environment(task, changes))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"rollout.environment": "nowhere.py:Sums"}, "rollout.environment: nowhere.py:Sums: .*no such file"),
    ({"reward_functions": ["f.py:environment"]}, "reward_functions: .*environment.* name of another"),
    ({"reward_variables": ["NOT_SET_ANYWHERE"]}, "reward_variables: NOT_SET_ANYWHERE is not set"),
])  # fmt: skip
def test_what_does_not_work_is_said_before_the_first_step(changes: dict[str, Any], reason: str,
                                                          task: dict[str, Any]) -> None:  # fmt: skip
    with pytest.raises(AssertionError, match=reason):
        run_ranks(steps_of, 1, with_environment(task, changes))
