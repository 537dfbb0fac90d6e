"""Scores in the middle of a run: the same in every layout, and the run is bit for bit what it is without
them."""

import random
from copy import deepcopy
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, score
from megatron.training import Training, train
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LLAMA, NEOX, RPE, begin, bit_equal, config, metric_rows

TP2, PP2, SP = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}, {"sequence_parallel": True}
# All of it cut up, also what is as small as here.
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
LEARNED = {"pos_emb": "learned", "hidden_dropout": 0.1, "attention_dropout": 0.1}
MOE = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.01}
# layout: ranks, its keys, the model
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, LLAMA),
    "dp2": (2, {}, NEOX | LEARNED),
    "tp2+sp": (2, TP2 | SP, LLAMA),
    "tp2 x pp2 +sp": (4, TP2 | PP2 | SP, NEOX | LEARNED),
    "dp2 x pp2": (4, PP2, LLAMA),
    "dp2 zero1 bf16": (2, {"zero_optimization": {"stage": 1}, "precision": "bfloat16"}, LLAMA),
    "dp2 zero3": (2, {"zero_optimization": ZERO3}, RPE | {"no_weight_tying": False}),
    "ep2": (2, {"expert_parallel_size": 2, "zero_optimization": {"stage": 1}}, LLAMA | MOE),
    "ep2 x tp2 +sp": (4, TP2 | SP | {"expert_parallel_size": 2}, LLAMA | MOE),
    "dp2 zero3 x tp2 +sp": (4, TP2 | SP | {"zero_optimization": ZERO3}, LLAMA),
}
STEPS, EVERY = 4, 2
# An odd number of contexts, so that data-parallel ranks have unequally much to do.
CONTEXTS = [[5, 3, 9, 9, 1, 2, 14], [7], [3, 8, 8, 8, 2, 10, 11]]
REQUESTS: list[ScoreRequest] = [(context, choice) for context in CONTEXTS for choice in ([4, 4, 8], [7, 1, 6, 6], [2])]


class Looking(Callback):
    """Scores before the first step and at every second one, and does what else an evaluation may do."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.found: dict[int, list[ContinuationScore]] = {}

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        if step.iteration % EVERY == 0:
            with run.pause():
                self.look(step)

    def look(self, step: Step) -> None:
        before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        stage = self.training.engine.stage
        modes = [(module.training, getattr(module, "sequence_parallel", None)) for module in stage.modules()]
        with self.training.inference() as model:
            assert not model.args.sequence_parallel and not model.stage.training
            self.found[step.iteration] = score(model, REQUESTS, batch_size=1)
            torch.manual_seed(0), np.random.seed(0), random.seed(0)
        after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert [(module.training, getattr(module, "sequence_parallel", None)) for module in stage.modules()] == modes
        step.row["looked"] = step.iteration


class Ran(NamedTuple):
    losses: list[float]
    weights: dict[int, dict[str, Tensor]]
    found: dict[int, list[ContinuationScore]]  # by step


def run(rank: int, world_size: int, values: dict[str, Any]) -> tuple[Ran, Ran]:
    """For the pool: a run without scores, and one with."""
    ran = []
    for looks in (False, True):
        training = begin(values)
        callback = Looking(training)
        losses: list[float] = []
        step_of = training.engine.train_step

        def noting(*args: Any, step_of: Any = step_of, losses: list[float] = losses) -> Any:
            result = step_of(*args)
            losses.append(float(result.loss))
            return result

        training.engine.train_step = noting  # type: ignore[method-assign]
        train(training, [callback] if looks else [])
        ran.append(Ran(losses, deepcopy(training.engine.weights(master=True)), callback.found))
        training.engine.close()
    return ran[0], ran[1]


def values_of(model: dict[str, Any], layout: dict[str, Any], ranks: int) -> dict[str, Any]:
    data = ranks // layout.get("model_parallel_size", 1) // layout.get("pipe_parallel_size", 1)
    micro = {"train_micro_batch_size_per_gpu": 4 // data}
    return config(model, layout, micro, train_iters=STEPS, eval_iters=1, eval_interval=3)


AT_ONCE, MORE = {"dp2 x pp2", "dp2 zero3"}, {"tp2 x pp2 +sp", "ep2 x tp2 +sp"}


@pytest.mark.parametrize("name", with_more(LAYOUTS, *MORE, product=LAYOUTS.keys() - AT_ONCE - MORE))
def test_a_run_does_not_notice(name: str) -> None:
    ranks, layout, model = LAYOUTS[name]
    everyone = run_ranks(run, ranks, values_of(model, layout, ranks))
    for plain, looked in everyone:
        assert looked.losses == plain.losses and len(plain.losses) == STEPS
        assert bit_equal(looked.weights, plain.weights)
        assert list(looked.found) == [0, 2, 4] and not plain.found
        assert looked.found == everyone[0][1].found, "every rank knows the scores"
        assert looked.found[0] != looked.found[2]
    if layout.get("precision") or ranks == 1:
        return
    one = run_ranks(run, 1, values_of(model, {}, 1) | {"train_iters": EVERY})[0][1]
    for ours, theirs in zip(everyone[0][1].found[0], one.found[0], strict=True):
        assert ours.greedy == theirs.greedy
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-5)


def test_what_callbacks_add_is_logged(tmp_path: Path) -> None:
    run_ranks(run, 1, values_of(LLAMA, {}, 1) | {"log_dir": str(tmp_path / "logs")})
    rows = metric_rows(tmp_path, "looked")
    assert [(row["iteration"], row["looked"]) for row in rows] == [(0, 0), (2, 2), (4, 4)]


def compiled(
    rank: int, world_size: int, values: dict[str, Any]
) -> tuple[int, int, list[ContinuationScore], list[ContinuationScore]]:
    """For the pool: graphs made before and after a run, and the scores of compiled and of plain blocks."""
    from torch._dynamo.utils import counters

    real = nn.Module.compile
    nn.Module.compile = partialmethod(real, backend="eager")  # type: ignore[assignment]
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    training = begin(values)
    callback = Looking(training)
    before = counters["stats"]["unique_graphs"]
    train(training, [callback])
    after_run = counters["stats"]["unique_graphs"]
    plain = Looking(begin({**values, "compile": False}))
    plain.look(Step(0, 0, 32, None))
    return before, after_run, callback.found[0], plain.found[0]


def test_compiled_blocks_are_not_compiled_again() -> None:
    """However long the texts are: no graphs are made but those of the steps, of blocks and of logits."""
    values = values_of(LLAMA, {"compile": "block"}, 1) | {"eval_iters": 0}
    before, graphs, ours, theirs = run_ranks(compiled, 1, values, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"})[0]
    assert (before, graphs) == (0, 2)
    assert ours == theirs
