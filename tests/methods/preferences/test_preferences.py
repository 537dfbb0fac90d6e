"""Preferences: the same step in every layout, ln 2 where the policy is its own reference."""

import math
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import batch_responses, with_responses
from megatron.methods.kto.objective import KtoSettings, kto
from megatron.methods.preferences.objective import dpo
from megatron.methods.preferences.pair_losses import PairSettings
from megatron.objectives import Objective
from megatron.training.engine import Engine
from megatron.training.engine_choice import choose_engine
from megatron.training.evaluation import evaluate_objective
from megatron.training.parallelize import parallelize
from tests.model.runs import LLAMA, LR, SGD, Step, full_weights
from tests.model.stages import groups_of, make_stage, random_weights, small
from tests.objectives.cases import ANSWERS, MISMATCHED, PAIRS, documents_of, in_rows, shared_in_rows
from tests.objectives.steps import scores, step_loss
from tests.pool import run_ranks
from tests.training.layout_runs import zero
from tests.training.runs import cells

TP2, PP2, DEEPSPEED = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}, {"engine": "deepspeed"}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, TP2), (2, PP2), (4, TP2 | PP2), *((2, zero(stage)) for stage in range(4)),
    (2, TP2 | DEEPSPEED), (2, zero(1) | DEEPSPEED), (2, zero(3) | DEEPSPEED),
]  # fmt: skip
OBJECTIVES: dict[str, Objective] = {
    "dpo": dpo({"sigmoid": 0.5, "sft": 0.3, "aot": 0.2}, PairSettings(0.3)),
    "sigmoid": dpo({"sigmoid": 1.0}, PairSettings()),
    "unpaired": dpo({"aot_unpaired": 1.0}, PairSettings(0.3)),
    "orpo": dpo({"orpo": 1.0}, PairSettings()),
    "kto": kto(KtoSettings(0.3, 1.5)),
}
LOOK = {"packed": True, "padded": False}


class Run(NamedTuple):
    """One rank's: the loss where the policy is its own reference; a step against another."""

    at_start: float
    step: Step
    metrics: dict[str, float]
    validation: float  # the same step's, without gradients
    validation_metrics: dict[str, float]


def pair_batches(packed: bool) -> list[Batch]:
    """Four micro-batches of a pair; the third's reference is far off. Packed, two hold the prompt once."""
    batches, documents = [], documents_of(PAIRS)
    for i in range(4):
        rows, length = ([[0, 1]], 28) if packed else ([[0], [1]], 16)
        pair = documents[2 * i : 2 * i + 2]
        batch = (shared_in_rows if packed and i in (0, 3) else in_rows)(pair, rows, length, [1.0, 1.0])
        batches.append(with_responses(batch, reference_logprobs=torch.tensor([-20.0 - 7 * i, -30.0 + 5 * i])))
    return batches


def kto_batches(packed: bool) -> list[Batch]:
    batches = []
    for i in range(4):
        prompt, answer, good = ANSWERS[i]
        batch = in_rows([(prompt, answer)], [[0]], 20, [1.0 if good else -1.0])
        mismatched = in_rows(MISMATCHED[i : i + 2], [[1, 0]] if packed else [[0], [1]], 32, [1.0, float(i != 2)])
        mismatched = with_responses(mismatched, reference_logprobs=torch.tensor([-60.0, -80.0]))
        sums = torch.tensor([-25.0 - 5 * i])
        batches.append(with_responses(batch, reference_logprobs=sums, kl_batch=mismatched))
    return batches


def from_policy(engine: Engine) -> Any:
    def fill(batches: list[Batch]) -> list[Batch]:
        pairs = zip(batches, engine.scores(batches), strict=True)
        filled = [with_responses(b, reference_logprobs=sums) for b, sums in pairs]
        kl_batches = [batch_responses(b).kl_batch for b in filled]
        return [
            b if kl is None else with_responses(b, kl_batch=fill([kl])[0])
            for b, kl in zip(filled, kl_batches, strict=True)
        ]

    return fill


def run(rank: int, world_size: int, cells: list[tuple[dict[str, Any], str, bool]]) -> list[Run]:
    """For the pool. cells: layout, objective, packed."""
    runs = []
    for layout, name, packed in cells:
        data = world_size // (layout.get("model_parallel_size", 1) * layout.get("pipe_parallel_size", 1))
        keys = {**LLAMA, **SGD, **layout, "gradient_accumulation_steps": 4 // data, "seq_length": 32}
        args = small(**keys).for_world(world_size)
        groups = groups_of(args, world_size)
        stage = make_stage(args, random_weights(args), groups)
        engine = parallelize(stage, OBJECTIVES[name], args, groups, choose_engine(args).load())
        batches = (kto_batches if name == "kto" else pair_batches)(packed)[groups.rank("data") :: data]
        engine.use_reference(from_policy(engine))
        start = float(engine.train_step(batches, 0.0).loss)
        engine.use_reference(None)
        with mock.patch("megatron.training.evaluation.eval_batches", lambda *_, batches=batches: iter(batches)):
            evaluated = evaluate_objective(engine, [], 0, None)  # type: ignore[arg-type]
        result = engine.train_step(batches, LR)
        step = Step(result.loss.detach(), [], groups.rank("tensor"), engine.weights())
        runs.append(Run(start, step, {key: float(value) for key, value in result.metrics.items()}, *evaluated))
        engine.close()
    return runs


@pytest.fixture(scope="module")
def single() -> dict[tuple[str, bool], Run]:
    """One process, by objective and packing."""
    looks = [(name, packed) for name in OBJECTIVES for packed in LOOK.values()]
    return dict(zip(looks, run_ranks(run, 1, [({}, *look) for look in looks])[0], strict=True))


def assert_same(ranks: list[Run], expected: Run) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank.step.loss, expected.step.loss, rtol=1e-5, atol=1e-6)
        assert rank.validation == pytest.approx(float(expected.step.loss), rel=1e-5)
        assert rank.validation_metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
        assert rank.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
        assert rank.at_start == pytest.approx(expected.at_start, abs=1e-6)
    args = small(**LLAMA, **SGD, seq_length=32)
    actual, expected_weights = full_weights(args, [rank.step for rank in ranks]), full_weights(args, [expected.step])
    torch.testing.assert_close(actual, expected_weights, rtol=1e-5, atol=2e-5)


# One objective in all layouts of two ranks by `make test`; both looks of all in one process, below.
DEFAULT_CELL, MORE_CELL = ("dpo", "packed"), ("kto", "padded")
PRODUCT_CELLS = [cell for cell in product(OBJECTIVES, LOOK) if cell not in (DEFAULT_CELL, MORE_CELL)]


@pytest.mark.parametrize(("name", "look"), cells([DEFAULT_CELL], [MORE_CELL], PRODUCT_CELLS))
def test_layouts_agree(name: str, look: str, single: dict[tuple[str, bool], Run]) -> None:
    for size in (2,) if (name, look) == DEFAULT_CELL else (2, 4):
        runs = [(layout, name, LOOK[look]) for world, layout in LAYOUTS if world == size]
        for ranks in zip(*run_ranks(run, size, runs), strict=True):
            assert_same(list(ranks), single[name, False])  # padded: packing changes nothing either


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packing_changes_nothing(name: str, single: dict[tuple[str, bool], Run]) -> None:
    assert_same([single[name, True]], single[name, False])


def test_a_policy_that_is_its_reference(single: dict[tuple[str, bool], Run]) -> None:
    for packed in LOOK.values():  # of the other layouts, `test_layouts_agree` says it
        assert single["sigmoid", packed].at_start == pytest.approx(math.log(2), abs=1e-6)
        # Desirable ones weigh 1.5: three of them and an undesirable one.
        assert single["kto", packed].at_start == pytest.approx(0.5 * (3 * 1.5 + 1) / 4, abs=1e-6)


def loss_in(dtype: torch.dtype, sums: torch.dtype = torch.float32) -> Tensor:
    """DPO of long pairs, weights bf16, activations `dtype`; `sums` bfloat16: of torch's log-probabilities."""
    args = small(**LLAMA, seq_length=400, max_position_embeddings=512)
    generator = torch.Generator().manual_seed(7)
    samples = torch.randint(4, 60, (4, 3, 360), generator=generator).tolist()
    documents = documents_of([(prompt[:20], chosen, rejected[:180]) for prompt, chosen, rejected in samples])
    batch = in_rows(documents, [[i] for i in range(8)], 400, [1.0] * 8)
    reference, policy = (make_stage(args, random_weights(args)) for _ in range(2))
    with torch.no_grad():
        for param in policy.parameters():
            param += 0.02 * torch.randn(param.shape, generator=generator)
        for param in [*reference.parameters(), *policy.parameters()]:
            param.copy_((param / 4 if param.dim() > 1 else param).bfloat16())
        reference.to(dtype), policy.to(dtype)
        if sums == torch.bfloat16:
            document_logprobs = []
            for stage in (policy, reference):
                logprobs = stage(None, batch).log_softmax(-1).transpose(0, 1)
                label_logprobs = logprobs.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
                document_logprobs.append((label_logprobs * batch.loss_weights).sum(1))
            log_ratios = (document_logprobs[0] - document_logprobs[1]).float()
            return -torch.nn.functional.logsigmoid(0.1 * (log_ratios[0::2] - log_ratios[1::2])).mean()
        batch = with_responses(batch, reference_logprobs=scores(lambda b: reference(None, b), [batch])[0])
        return step_loss(dpo({"sigmoid": 1.0}, PairSettings(0.1)), lambda b: policy(None, b), [batch])[0]


def test_sums_are_in_fp32_under_bf16() -> None:
    """TRL up to 1.10 summed log-probabilities in bf16: 18 % off."""
    exact, rounded = loss_in(torch.float32), loss_in(torch.bfloat16)
    assert rounded.dtype == torch.float32 and float(rounded) == pytest.approx(float(exact), rel=5e-3)
    assert abs(float(loss_in(torch.bfloat16, torch.bfloat16) / exact) - 1) > 0.02, "these pairs do not tell"
