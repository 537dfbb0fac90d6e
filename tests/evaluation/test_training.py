"""Evaluation during training: in every layout, without a trace in the training."""

import dataclasses
import gc
import io
import json
import logging
import os
import random
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from megatron.callbacks import Callback
from megatron.evaluation import InTraining
from megatron.neox_arguments import ConfigError
from megatron.training import train
from tests.evaluation.runs import make_tasks
from tests.generation.runs import lines
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import NEOX, begin, bit_equal, config

TASKS = ["shipped_choice", "shipped_perplexity", "own_text"]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}), "tp2 with sequence parallelism": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipe_parallel_size": 2}), "zero 3": (2, {"zero_optimization": {"stage": 3}}),
    "tp2 x pp2": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2}),
}  # fmt: skip


def values_of(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Four steps with dropout, so that random numbers matter, evaluated before and after every second."""
    make_tasks(folder)
    return config(NEOX, hidden_dropout=0.1, attention_dropout=0.1, train_iters=4, eval_interval=2,
                  log_dir=str(folder / "logs"), eval_tasks=TASKS, eval_limit=3, eval_include_path=str(folder),
                  train_batch_size=8, **overrides)  # fmt: skip


def equal_weights(rank: int, world: int, values: dict[str, Any], folder: str) -> bool:
    """For the pool: whether this rank's weights are the same bits."""
    rank_weights = []
    for name in ("with", "without"):
        training = begin({**values, "log_dir": f"{folder}/{name}"})
        train(training, [InTraining(training)] if name == "with" else [])
        rank_weights.append(training.engine.weights(master=True))
        training.engine.close()
    return bit_equal(*rank_weights)


Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], tuple[Rows, Rows]]:
    """By layout: metrics with evaluation and without, of runs whose weights were the same bits."""

    @cache
    def run_layout(layout: str) -> tuple[Rows, Rows]:
        folder, (ranks, changes) = tmp_path_factory.mktemp("run"), LAYOUTS[layout]
        are_equal = run_ranks(equal_weights, ranks, values_of(folder, **changes), str(folder), timeout=600)
        assert are_equal == [True] * ranks
        return lines(folder / "with" / "metrics.jsonl"), lines(folder / "without" / "metrics.jsonl")

    return run_layout


def scored(rows: Rows, name: str = "eval_tasks/shipped_perplexity_byte_perplexity") -> dict[int, float]:
    return {row["iteration"]: row[name] for row in rows if name in row}


@pytest.mark.parametrize("layout", with_more(LAYOUTS, product=["tp2 x pp2", "pp2", "tp2 with sequence parallelism"]))
def test_training_is_bit_equal_with_and_without_evaluation(layout, runs):
    evaluated, baseline = runs(layout)
    losses = [[row["train/lm_loss"] for row in metrics if "train/lm_loss" in row] for metrics in (evaluated, baseline)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    perplexity = scored(evaluated)
    assert list(perplexity) == [0, 2, 4] == list(scored(evaluated, "eval_tasks/shipped_choice_acc"))
    assert len(set(perplexity.values())) == 3, "the model changes, and what is scored is the model"
    first_score = scored(runs("plain")[0])[0]
    assert perplexity[0] == pytest.approx(first_score, rel=1e-5), "every layout starts from the same weights"
    assert not any(name.startswith("eval_tasks/") for row in baseline for name in row)


def generators() -> tuple[Any, ...]:
    name, keys, *position = np.random.get_state()
    return random.getstate(), name, keys.tolist(), position, torch.get_rng_state().tolist()


def several(rank: int, world: int, values: dict[str, Any]) -> list[tuple[int, int]]:
    """For the pool: live requests and tensors after each of six evaluations."""
    training = begin(values)
    callback, counts = InTraining(training), []

    class CountingCallback(Callback):
        def on_step_end(self, run: Any, step: Any) -> None:
            states = generators()
            with run.pause():
                callback.on_validation_end(run, step)
            assert generators() == states
            gc.collect()
            alive = gc.get_objects()
            counts.append((sum(type(x) is Instance for x in alive), sum(isinstance(x, torch.Tensor) for x in alive)))

    train(training, [CountingCallback()])
    training.engine.close()
    return counts


def test_nothing_stays_in_memory_and_no_random_number_is_drawn(tmp_path):
    counts = run_ranks(several, 1, values_of(tmp_path) | {"train_iters": 5}, timeout=600)[0]
    assert [requests for requests, _ in counts] == [0] * 6
    tensors = [count for _, count in counts[2:]]  # the first step makes the optimizer's
    assert max(tensors) == min(tensors), counts


def failing(rank: int, world: int, values: dict[str, Any]) -> list[str]:
    """For the pool: what the log says, and what ended the run."""
    training, log, end_lines = begin(values), io.StringIO(), []
    training.logger.addHandler(logging.StreamHandler(log))
    try:
        train(training, [InTraining(training)])
    except ConfigError as problem:
        end_lines.append(f"ended: {problem}")
    training.engine.close()
    return log.getvalue().splitlines() + end_lines


@pytest.mark.parametrize("policy", ["report", "stop"])
def test_a_failed_task_is_reported_and_ends_the_run_only_on_request(policy, tmp_path):
    tasks = ["own_gone", "own_long", "shipped_choice"]
    values = values_of(tmp_path, pipe_parallel_size=2) | {"eval_tasks": tasks, "eval_failures": policy}
    values["eval_output_dir"] = str(tmp_path / "results")
    task_text = (tmp_path / "own_text.yaml").read_text()
    for name, old, new in (("own_gone", "own.jsonl", "gone.jsonl"), ("own_long", "toks: 12", "toks: 900")):
        (tmp_path / f"{name}.yaml").write_text(task_text.replace("own_text", name).replace(old, new))
    logs = run_ranks(failing, 2, values, timeout=600)
    text = "\n".join(logs[0])
    assert "own_gone" in text and "gone.jsonl" in text
    if policy == "stop":
        assert all(lines[-1].startswith("ended: ") and "eval_failures: stop" in lines[-1] for lines in logs)
        return
    assert re.search(r"own_long .*ValueError: max_gen_toks: .* 900 ", text)
    assert "run finished at iteration 4" in text
    accuracies = scored(lines(tmp_path / "logs" / "metrics.jsonl"), "eval_tasks/shipped_choice_acc")
    assert list(accuracies) == [0, 2, 4], "the others are scored"
    for step in accuracies:
        results = json.loads((tmp_path / "results" / f"eval_results_step{step}.json").read_text())
        assert results["config"]["model_args"]["iteration"] == step


def refused(rank: int, world: int, values: dict[str, Any], changes: list[dict[str, Any]]) -> list[str]:
    """For the pool: what is said of each change of keys when the callback is made, if anything."""
    training, messages = begin(values), []
    for keys in changes:
        try:
            InTraining(dataclasses.replace(training, args=training.args.replace(**keys)))
            messages.append("")
        except ConfigError as problem:
            messages.append(str(problem))
    training.engine.close()
    return messages


def test_misspelt_metrics_and_tasks_are_refused_before_anything_is_evaluated(tmp_path):
    values = values_of(tmp_path) | {"eval_tasks": ["shipped_choice", "own_text", "own_group"], "eval_num_fewshot": 0}
    good = ["eval_tasks/shipped_choice_acc", "eval_tasks/own_text_exact_match", "eval_tasks/own_choice_acc_norm",
            "eval_tasks/own_group_acc", "validation/lm_loss"]  # fmt: skip
    bad = ["eval_tasks/shipped_choice_accuracy:max", "eval_tasks/own_txt_exact_match", "eval_tasks/choice_acc"]
    changes: list[dict[str, Any]] = [{"save_best": metric} for metric in (*good, *bad)]
    for messages in run_ranks(refused, 2, values, [*changes, {"eval_tasks": ["gone.yaml"]}], timeout=600):
        assert messages[: len(good)] == [""] * len(good)
        *metric_messages, task_message = messages[len(good) :]
        for metric, line in zip(bad, metric_messages, strict=True):
            assert f"save_best: {metric.removesuffix(':max')}: " in line and "eval_tasks/shipped_choice_acc, " in line
        assert "eval_tasks: gone.yaml: no such file" in task_message


def interrupted(rank: int, world: int, values: dict[str, Any]) -> list[str]:
    """For the pool: what the log says of a run that gets SIGTERM while it evaluates after its second step."""
    from megatron.evaluation import language_model, model_operations

    training, log, real, calls = begin(values), io.StringIO(), model_operations.score, []
    language_model._FIRST_PART = 1
    training.logger.addHandler(logging.StreamHandler(log))

    def scored(*args: Any, **options: Any) -> Any:
        calls.append(training.progress.iteration)
        if calls.count(2) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)

    model_operations.score = scored
    train(training, [InTraining(training)])
    training.engine.close()
    return [*log.getvalue().splitlines(), f"parts: {calls.count(0)} {calls.count(2)}"]


def test_a_signal_does_not_wait_for_the_rest_of_an_evaluation(tmp_path):
    keys = {"eval_tasks": ["shipped_choice"], "eval_limit": 20, "train_iters": 8}
    values = values_of(tmp_path, model_parallel_size=2) | keys
    logs = run_ranks(interrupted, 2, values, timeout=600)
    parts_before_training, parts_of_step_2 = map(int, logs[0][-1].removeprefix("parts: ").split())
    assert parts_before_training > parts_of_step_2 == 2
    text = "\n".join(logs[0])
    assert "evaluating: given up" in text
    assert "run stopped at iteration 2: signal SIGTERM" in text
    assert list(scored(lines(tmp_path / "logs" / "metrics.jsonl"), "eval_tasks/shipped_choice_acc")) == [0]
