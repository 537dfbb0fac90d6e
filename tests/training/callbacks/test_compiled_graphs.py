"""Graphs of torch.compile while a run goes on: their metric, one warning, none for what stands beside
steps."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from megatron.callbacks import Step
from megatron.training.callbacks.compiled_graphs import CompiledGraphs
from megatron.training.evaluation import evaluate, evaluate_objective
from megatron.training.loop import batches_of
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.preference.test_reference import FLY, PADDED, begin, preferences
from tests.training.runs import LLAMA, config


def test_metric_and_one_warning_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    double = torch.compile(lambda x: 2 * x, backend=CompileCounter(), dynamic=False)
    run: Any = SimpleNamespace(args=SimpleNamespace(log_interval=2), logger=logging.getLogger("graphs"))
    callback, rows = CompiledGraphs(), []
    for iteration in range(1, 14):
        double(torch.ones(iteration // 2 + 1))
        step = Step(iteration, 0, 0, SimpleNamespace())  # type: ignore[arg-type]
        callback.on_step_end(run, step)
        rows.append({name: step.row[name] for name in step.row if name.startswith("runtime/")})
    assert rows[0] == rows[2] == {}
    assert rows[1] == {"runtime/compiled_graphs": 2, "runtime/recompilations": 0}
    assert rows[9] == {"runtime/compiled_graphs": 6, "runtime/recompilations": 4}
    (record,) = caplog.records
    assert record.message.startswith("torch.compile has made 5 graphs since the second step")
    assert "size mismatch at index 0. expected" in record.message
    torch._dynamo.reset()


def graphs_of(rank: int, world_size: int, values: dict[str, Any]) -> list[int]:
    """For the pool: how many graphs there are after the second step, after a validation, whose last batch is
    smaller, and after another step."""
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend="eager")  # of blocks and of what is done to logits
    training, _ = begin(values)
    batches, found = batches_of(training), []
    for part in ("steps", "validation", "steps"):
        if part == "steps":
            for _ in range(2):
                training.engine.train_step(next(batches), 1e-4)
        else:
            assert training.datasets.train is not None
            validate: Any = evaluate_objective if "train_impl" in values else evaluate
            validate(training.engine, training.datasets.train, 3, training.tokenizer.eod)
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.mark.parametrize("kind", with_more(["language modelling", "DPO"], "DPO"))
def test_validation_makes_no_graphs(kind: str, tmp_path: Path) -> None:
    """Steps have one of blocks and one of logits; those of DPO two of logits, and one of the blocks of the
    reference, without gradients."""
    if kind == "DPO":
        values, graphs = preferences(tmp_path, FLY, PADDED, compile="block"), 4
    else:
        values, graphs = config(LLAMA, compile="block", train_micro_batch_size_per_gpu=2), 2
    assert run_ranks(graphs_of, 1, values) == [[graphs, graphs, graphs]]
