"""Scores in the middle of a run, which does not notice them; validation loss, the same in every layout."""

import math
import random
from copy import deepcopy
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor, nn

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.data.batch import collate_samples
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, score
from megatron.training import Training, train
from megatron.training.evaluation import ValidationResult, evaluate
from tests.pool import run_ranks
from tests.training.runs import LLAMA, NEOX, RPE, begin, bit_equal, cells, config, metric_rows
from tests.training.test_layouts import LAYOUTS as TRAINED_IN

TP2, PP2, SP = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}, {"sequence_parallel": True}
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}  # all of it cut up, also what is as small as here
LEARNED = {"pos_emb": "learned", "hidden_dropout": 0.1, "attention_dropout": 0.1}
MOE = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.01}
# layout: ranks, its keys, the model
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, LLAMA), "dp2": (2, {}, NEOX | LEARNED), "tp2+sp": (2, TP2 | SP, LLAMA),
    "tp2 x pp2 +sp": (4, TP2 | PP2 | SP, NEOX | LEARNED), "dp2 x pp2": (4, PP2, LLAMA),
    "dp2 zero1 bf16": (2, {"zero_optimization": {"stage": 1}, "precision": "bfloat16"}, LLAMA),
    "dp2 zero3": (2, {"zero_optimization": ZERO3}, RPE | {"no_weight_tying": False}),
    "ep2": (2, {"expert_parallel_size": 2, "zero_optimization": {"stage": 1}}, LLAMA | MOE),
    "ep2 x tp2 +sp": (4, TP2 | SP | {"expert_parallel_size": 2}, LLAMA | MOE),
    "dp2 zero3 x tp2 +sp": (4, TP2 | SP | {"zero_optimization": ZERO3}, LLAMA),
}  # fmt: skip
STEPS, LOOK_EVERY = 4, 2
# An odd number of contexts, so that data-parallel ranks have unequally much to do.
CONTEXTS = [[5, 3, 9, 9, 1, 2, 14], [7], [3, 8, 8, 8, 2, 10, 11]]
Scores = list[ContinuationScore]
REQUESTS: list[ScoreRequest] = [(context, choice) for context in CONTEXTS for choice in ([4, 4, 8], [7, 1, 6, 6], [2])]


class Looking(Callback):
    """Scores before the first step and at every second one, and does what else an evaluation may do."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.scores: dict[int, Scores] = {}

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        if step.iteration % LOOK_EVERY == 0:
            with run.pause():
                self.look(step)

    def look(self, step: Step) -> None:
        states_before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        stage = self.training.engine.stage
        modes = [(module.training, getattr(module, "sequence_parallel", None)) for module in stage.modules()]
        with self.training.inference() as model:
            assert not model.args.sequence_parallel and not model.stage.training
            self.scores[step.iteration] = score(model, REQUESTS, batch_size=1)
            torch.manual_seed(0), np.random.seed(0), random.seed(0)
        states_after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(states_before[0], states_after[0]) and states_before[1:] == states_after[1:]
        assert [(module.training, getattr(module, "sequence_parallel", None)) for module in stage.modules()] == modes
        step.row["looked"] = step.iteration


class Ran(NamedTuple):
    losses: list[float]
    weights: dict[int, dict[str, Tensor]]
    scores: dict[int, Scores]  # by step


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
        ran.append(Ran(losses, deepcopy(training.engine.weights(master=True)), callback.scores))
        training.engine.close()
    return ran[0], ran[1]


def values_of(model: dict[str, Any], layout: dict[str, Any], ranks: int) -> dict[str, Any]:
    data = ranks // layout.get("model_parallel_size", 1) // layout.get("pipe_parallel_size", 1)
    micro = {"train_micro_batch_size_per_gpu": 4 // data}
    return config(model, layout, micro, train_iters=STEPS, eval_iters=1, eval_interval=3)


AT_ONCE, MORE_LAYOUTS = ["dp2 x pp2", "dp2 zero3"], ["tp2 x pp2 +sp"]


@pytest.mark.parametrize(
    "name", cells(AT_ONCE, MORE_LAYOUTS, [name for name in LAYOUTS if name not in AT_ONCE + MORE_LAYOUTS])
)
def test_a_run_does_not_notice(name: str) -> None:
    ranks, layout, model = LAYOUTS[name]
    everyone = run_ranks(run, ranks, values_of(model, layout, ranks))
    for unobserved, observed in everyone:
        assert observed.losses == unobserved.losses and len(unobserved.losses) == STEPS
        assert bit_equal(observed.weights, unobserved.weights)
        assert list(observed.scores) == [0, 2, 4] and not unobserved.scores
        assert observed.scores == everyone[0][1].scores, "every rank knows the scores"
        assert observed.scores[0] != observed.scores[2]
    if layout.get("precision") or ranks == 1:
        return
    one_process = run_ranks(run, 1, values_of(model, {}, 1) | {"train_iters": LOOK_EVERY})[0][1]
    for actual, expected in zip(everyone[0][1].scores[0], one_process.scores[0], strict=True):
        assert actual.greedy == expected.greedy
        torch.testing.assert_close(torch.tensor(actual.logprobs), torch.tensor(expected.logprobs), rtol=0, atol=1e-5)


def test_what_callbacks_add_is_logged(tmp_path: Path) -> None:
    run_ranks(run, 1, values_of(LLAMA, {}, 1) | {"log_dir": str(tmp_path / "logs")})
    assert [(row["iteration"], row["looked"]) for row in metric_rows(tmp_path, "looked")] == [(0, 0), (2, 2), (4, 4)]


def compiled(rank: int, world_size: int, values: dict[str, Any]) -> tuple[int, int, Scores, Scores]:
    """For the pool: graphs made before and after a run, and the scores of compiled and of plain blocks."""
    from torch._dynamo.utils import counters

    nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")  # type: ignore[assignment]
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    training = begin(values)
    callback, graphs_before = Looking(training), counters["stats"]["unique_graphs"]
    train(training, [callback])
    after_run, uncompiled = counters["stats"]["unique_graphs"], Looking(begin({**values, "compile": False}))
    uncompiled.look(Step(0, 0, 32, None))
    return graphs_before, after_run, callback.scores[0], uncompiled.scores[0]


def test_compiled_blocks_are_not_compiled_again() -> None:
    """However long the texts are: no graphs are made but those of the steps, of blocks and of logits."""
    values = values_of(LLAMA, {"compile": "block"}, 1) | {"eval_iters": 0}
    graphs_before, graphs, compiled_scores, eager_scores = run_ranks(
        compiled, 1, values, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    )[0]
    assert (graphs_before, graphs) == (0, 3) and compiled_scores == eager_scores


# -- validation
def evaluations(rank: int, world_size: int, values: dict[str, Any]) -> list[ValidationResult]:
    """For the pool: the initial model on the first five, eight and sixteen validation samples."""
    training = begin(values)
    tokenizer, valid = training.tokenizer, cast(Any, training.datasets.valid)
    sums = [evaluate(training.engine, valid, n, tokenizer.eod, tokenizer.detokenize) for n in (5, 8, 16)]
    return [set_sums.result() for set_sums in sums]


def evaluated_values(model: dict[str, Any], layout: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    return config(model, layout, train_micro_batch_size_per_gpu=micro_batch, eval_iters=2)


@pytest.fixture(scope="module")
def one_process() -> dict[str, list[ValidationResult]]:
    models = {"neox": NEOX, "llama": LLAMA}
    return {name: run_ranks(evaluations, 1, evaluated_values(model, {}, 8))[0] for name, model in models.items()}


VALIDATED, IN_MORE = ["dp2 x pp2", "tp2 x pp2 +sp", "dp2 zero3"], ["pp4", "dp4 zero3 by twos"]
PRODUCT = [name for name in TRAINED_IN if name not in VALIDATED + IN_MORE]


@pytest.mark.parametrize("name", cells(VALIDATED, IN_MORE, PRODUCT))
def test_same_in_every_layout(name: str, one_process: dict[str, list[ValidationResult]]) -> None:
    ranks, layout = TRAINED_IN[name]
    model, values = ("llama", LLAMA) if "tp2" in name else ("neox", NEOX)
    everyone = run_ranks(evaluations, ranks, evaluated_values(values, layout, 2))
    assert all(results == everyone[0] for results in everyone), "every rank knows the result"
    for actual, expected in zip(everyone[0], one_process[model], strict=True):
        assert actual.lm_loss == pytest.approx(expected.lm_loss, rel=1e-6)
        assert actual.unigram_entropy == pytest.approx(expected.unigram_entropy, rel=1e-12)
        assert actual.tokens_per_character == expected.tokens_per_character


def direct(rank: int, world_size: int, values: dict[str, Any]) -> tuple[float, list[np.ndarray]]:
    """For the pool: mean loss of five samples, one at a time through the bare model, and their labels."""
    training = begin(values)
    valid, losses, labels = cast(Any, training.datasets.valid), [], []
    for i in range(5):
        batch = collate_samples([valid[i]], eod=training.tokenizer.eod, eod_mask_loss=True)
        counts = batch.loss_weights[0] > 0
        logits = training.engine.stage(None, batch)[:, 0].double()  # type: ignore[index]
        losses.append(torch.nn.functional.cross_entropy(logits[counts], batch.labels[0][counts], reduction="sum"))
        labels.append(batch.labels[0][counts].numpy())
    return float(torch.stack(losses).sum()) / sum(map(len, labels)), labels


def test_a_loss_of_nan_has_no_perplexity() -> None:
    result = ValidationResult(math.nan, 1.0, tokens_per_character=0.25)
    assert math.isnan(result.perplexity) and math.isnan(result.character_perplexity or 0.0)


def test_against_the_bare_model(one_process: dict[str, list[ValidationResult]]) -> None:
    """Characters are those of the text of the labels that the loss is over; a document's end has none."""
    values, result = evaluated_values(NEOX, {}, 8), one_process["neox"][0]
    loss, labels = run_ranks(direct, 1, values)[0]
    assert result.lm_loss == pytest.approx(loss, rel=1e-6)
    shares = np.unique(np.concatenate(labels), return_counts=True)[1] / sum(map(len, labels))
    assert result.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    library = tokenizers.Tokenizer.from_file(values["vocab_file"])
    characters = sum(len(library.decode(row.tolist(), skip_special_tokens=True)) for row in labels)
    assert result.tokens_per_character == pytest.approx(sum(map(len, labels)) / characters, rel=1e-12)
    assert 0.05 < result.tokens_per_character < 1.0
    assert result.character_perplexity == pytest.approx(np.exp(result.lm_loss * result.tokens_per_character))
