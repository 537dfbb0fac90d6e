"""A task that a tiny model learns from rewards alone: the sum of two digits, a token an answer."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from megatron.methods.reinforcement.rollouts import Rollouts
from megatron.training import Training, train
from megatron.training.method import StepData
from tests.pool import run_ranks
from tests.training.runs import begin

WORDS = ["<eod>", *map(str, range(10)), "+", "=", "a", "b", "c"]
REWARDS = '''def right(prompts, completions, answer, **columns):
    """Whether the first word is the sum."""
    return [float(text.split()[:1] == [one]) for text, one in zip(completions, answer)]

def shuffled(prompts, completions, completion_ids, answer, **columns):
    """Of another answer of the step: nothing to learn from."""
    values = right(prompts, completions, answer)
    return values[len(values) // 2 :] + values[: len(values) // 2]

def wordy(prompts, completions, **columns):
    return [0.25 * len(text.split()) - 0.5 * text.split().count("a") for text in completions]

def lengths(completion_ids, **columns):
    return [len(ids) for ids in completion_ids]

def broken(prompts, completions, answer, **columns):
    """Raises where the sum is 3."""
    if "3" in answer:
        raise ValueError("no three")
    return right(prompts, completions, answer)


def miscounts(prompts, **columns):
    return [1.0] * (len(prompts) + 1)


def silent(prompts, **columns):
    """Has no opinion, and fails where it is asked about 0 + 0."""
    return [float("nan") if prompt == "0 + 0 =" else None for prompt in prompts]
'''

ENVIRONMENT = """import os
import random

class Sums:  # a sum, then a word that is to be said again; half a point for each that is right
    def reset(self, prompt, seed, answer, **columns):
        self.answers, self.random = [answer], random.Random(seed)

    def step(self, completion):
        reward = 0.5 * (completion.split() == self.answers[-1:])
        if len(self.answers) == 2:
            return None, reward, True
        self.answers.append(str(self.random.randrange(3)))
        return f" c {self.answers[1]} =", reward, False

class Words(Sums):  # two words, of which each is to be said again
    def reset(self, prompt, seed, **columns):
        self.random = random.Random(seed)
        self.answers = [str(self.random.randrange(3))]
        return f" c {self.answers[0]} ="

class Talk(Sums):  # answers as a tool does, in a chat
    def reset(self, prompt, seed, **columns):
        self.turns = 0
        return [{"role": "user", "content": "b"}]

    def step(self, completion):
        self.turns += 1
        return [{"role": "tool", "content": str(self.turns)}], 1.0 if "1" in completion else None, False

class Deaf(Talk):  # fails whatever is said
    def reset(self, prompt, seed, **columns):
        self.turns = 0
        return [{"role": "tool", "content": "1"}]

class Broken(Sums):  # raises at some words, ends its process at others
    def step(self, completion):
        if "7" in completion:
            raise ValueError("seven")
        if "8" in completion:
            os._exit(1)
        return super().step(completion)
"""


def write_task(folder: Path, limit: int = 5) -> dict[str, Any]:
    """The task's files in a folder, and the configuration of a run on them. limit: numbers are below it."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eod>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<eod>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "environments.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(limit) for b in range(limit)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "max_position_embeddings": 16,
        "norm": "rmsnorm", "pos_emb": "rotary", "no_weight_tying": True, "make_vocab_size_divisible_by": 16,
        "train_batch_size": 16, "train_iters": 4, "eval_iters": 0, "precision": "fp32", "lr_decay_style": "constant",
        "warmup": 0.0, "weight_decay": 0.0, "num_workers": 0, "log_interval": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-6}},
        "tokenizer_type": "HFTokenizer", "vocab_file": str(folder / "tokenizer.json"), "eod_token": "<eod>",
        "train_impl": "reinforce", "dataset_impl": "online", "rl_loss_type": "grpo", "kl_div_beta": 0.0,
        "reward_functions": [f"{folder / 'rewards.py'}:wordy"],
        "rollout": {"prompts": [str(folder / "prompts.jsonl")], "num_generations": 4, "max_completion_length": 4},
    }  # fmt: skip


class StepResults(NamedTuple):
    """Results of a run's steps.

    answers: tokens of each answer, by generation. seeds: dropout seed of each micro-batch.
    """

    answers: list[list[list[int]]]
    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, float]]
    weights: dict[int, dict[str, torch.Tensor]]
    seeds: list[int]


def with_keys(task: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with keys changed, of sections by dotted path."""
    values = {**task, "rollout": dict(task["rollout"])}
    for change in changes:
        for key, value in change.items():
            section, _, name = key.rpartition(".")
            (values[section] if section else values)[name] = value
    return values


def for_pairs(task: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """The task of online DPO."""
    pair_keys = {key: value for key, value in task.items() if key not in ("rl_loss_type", "kl_div_beta")}
    return with_keys({**pair_keys, "train_impl": "dpo"}, *changes)


def rollouts_of(training: Training, folder: str | None = None) -> Rollouts:
    return Rollouts(training, None if folder is None else Path(folder), training.checkpointer.run_id)


@contextmanager
def started_run(values: Mapping[str, Any], logs: bool = True) -> Iterator[tuple[Training, Rollouts]]:
    """A run up to its first step, and its rollouts, which write beside its checkpoints."""
    training = begin(values)
    rollouts = rollouts_of(training, f"{values['save']}/logs" if logs and "save" in values else None)
    method: Any = training.method
    method.rollouts, method.begin = rollouts, lambda run: None
    try:
        yield training, rollouts
    finally:
        rollouts.close()
    training.engine.close()


def steps_of(rank: int, world_size: int, values: Mapping[str, Any], steps: int = 3) -> StepResults:
    """For the pool: some steps of a run, without its loop."""
    results = StepResults([], [], [], [], {}, [])
    with started_run(values, logs=False) as (training, rollouts):
        batches = iter(rollouts)
        for number in range(steps):
            step = next(batches)
            assert rollouts._generation is not None
            results.seeds.extend(batch.seed for batch in step)
            results.answers.append([answer.tokens for answer in rollouts._generation.answers])
            result = training.engine.train_step(step, training.schedule(number))
            training.progress.iteration += 1
            results.losses.append(float(result.loss))
            results.norms.append(float(result.grad_norm))  # type: ignore[arg-type]
            results.metrics.append({name: float(value) for name, value in result.metrics.items()})
        results.weights.update(training.engine.weights(master=True))
    return results


def full_run(rank: int, world_size: int, values: Mapping[str, Any], stop_at: int | None = None) -> dict[int, Any]:
    """For the pool: a run with its loop and its files; the weights it ends with."""
    with started_run(values) as (training, _):
        method: Any = training.method
        steps = method.steps

        def steps_until_stop(*arguments: Any) -> Iterator[StepData]:
            for step in steps(*arguments):
                if training.iteration == stop_at:
                    raise KeyboardInterrupt
                yield step

        method.steps = steps_until_stop
        try:
            train(training)
        except KeyboardInterrupt:
            training.checkpointer.wait()  # what is written beside the steps is there when it is killed
            return {}
        weights = training.engine.weights(master=True)
        return {layer: {name: value.clone() for name, value in tensors.items()} for layer, tensors in weights.items()}


def lines_of(folder: Path, name: str = "rollouts") -> list[dict[str, Any]]:
    """Returns the rows of a file in a run's logs."""
    return [json.loads(line) for line in (folder / "logs" / f"{name}.jsonl").read_text().splitlines()]


def assert_same_steps(actual: StepResults, reference: StepResults) -> None:
    """Up to the rounding of fp32 sums in another order."""
    assert actual.answers == reference.answers
    assert actual.losses == pytest.approx(reference.losses, rel=1e-5, abs=1e-6)
    assert actual.norms == pytest.approx(reference.norms, rel=1e-4)
    for now, reference_metrics in zip(actual.metrics, reference.metrics, strict=True):
        assert now == pytest.approx(reference_metrics, rel=1e-4, abs=2e-6)


LEARNS: dict[str, Any] = {"num_layers": 1, "train_batch_size": 64, "train_iters": 80, "log_interval": 50,
                          "checkpoint_factor": 1000, "optimizer": {"type": "Adam", "params": {"lr": 4e-3}}}  # fmt: skip


def learned(values: dict[str, Any], folder: Path, good: Callable[[dict[str, Any]], float]) -> list[float]:
    """How good the answers of a run are by their lines, in its first twentieth and in its last tenth."""
    run_ranks(full_run, 1, {**values, "save": str(folder)}, timeout=600)
    scores = [good(line) for line in lines_of(folder)]
    first_scores, last = scores[: len(scores) // 20], scores[-len(scores) // 10 :]
    return [sum(part) / len(part) for part in (first_scores, last)]


def is_right(line: dict[str, Any]) -> float:
    """Whether an answer begins with the sum."""
    a, _, b = line["prompt"].removesuffix(" =").split()
    return float(line["completion"].split()[:1] == [str(int(a) + int(b))])
