"""Rows of several documents give each of them the loss, and all of them the gradient, that they give
alone."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data import Batch, IndexedDataset, IndexedDatasetWriter
from megatron.data.batch import collate_samples as collate
from megatron.data.index_maps import Packing
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import build_maps
from megatron.training.engine import Engine
from tests.model.runs import LR, MODELS, Step, engine_for, whole_weights
from tests.model.stages import documents, random_weights, small
from tests.pool import run_ranks

LENGTHS = (5, 17, 2, 9, 6, 4, 8, 6, 3, 7)
SEQ, VOCAB, EOD = 16, 64, 0
TP2, PP2, SP = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}, {"sequence_parallel": True}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"attention_backend": "math"}, {"attention_backend": "flash"}, {"checkpoint_activations": True}],
    2: [TP2, TP2 | SP, PP2],
    4: [TP2 | PP2 | SP],
}
RESETS = {"eod": EOD, "reset_attention_mask": True, "reset_position_ids": True}


class Found(NamedTuple):
    """Of one way to lay out the documents: each one's summed loss by its first tokens, and a step's."""

    losses: dict[tuple[int, ...], float]
    step: Step


def write(folder: str, labelled: bool) -> tuple[IndexedDataset, IndexedDataset | None]:
    """Documents that end with EOD; of labelled ones, the first third is masked, as a prompt."""
    random = np.random.default_rng(1)
    rows = [[*random.integers(1, VOCAB, n - 1), EOD] for n in LENGTHS]
    datasets = []
    for name in ("text", "label") if labelled else ("text",):
        with IndexedDatasetWriter(f"{folder}/{name}", np.int32) as writer:
            for row in rows:
                masked = len(row) // 3 if name == "label" else 0
                writer.add_document(np.array([-100] * masked + row[masked:], np.int32))
        datasets.append(IndexedDataset(f"{folder}/{name}"))
    return datasets[0], datasets[1] if labelled else None


def batches(folder: str, labelled: bool, pack_impl: str, **options: Any) -> list[Batch]:
    """All documents, in two micro-batches."""
    text, labels = write(folder, labelled)
    packing = Packing(pack_impl)
    maps = build_maps(text.sizes, 0, len(text), 1, SEQ, 3, packing, labels)
    data = PackedDataset("train", text, maps, SEQ, VOCAB, packing=packing, labels=labels)
    half = len(data) // 2
    return [collate([data[i] for i in rows], **options) for rows in (range(half), range(half, len(data)))]


def look(engine: Engine, given: list[Batch]) -> Found:
    losses: dict[tuple[int, ...], float] = {}
    logprobs = engine.token_logprobs(given)
    for batch, batch_logprobs in zip(given, logprobs, strict=True):
        weighted = -batch_logprobs.double() * batch.loss_weights
        for row, first, last in documents(batch):
            if batch.tokens[row, first:last].any():
                losses[tuple(batch.tokens[row, first : first + 2].tolist())] = float(weighted[row, first:last].sum())
    loss = engine.train_step(given, LR).loss
    return Found(losses, Step(loss.detach(), logprobs, engine.groups.rank("tensor"), engine.weights()))


def looks(rank: int, world_size: int, cells: list[tuple[dict[str, Any], list[Batch]]]) -> list[Found]:
    """For the pool."""
    results = []
    for values, given in cells:
        engine = engine_for(values, world_size)
        results.append(look(engine, given))
        engine.close()
    return results


@pytest.fixture(scope="module", params=[False, True], ids=["lm", "sft"])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Batch]]:
    folder = str(tmp_path_factory.mktemp("data"))
    given = {name: batches(folder, request.param, name, **RESETS) for name in ("unpacked", "best_fit")}
    given["leaking"] = batches(folder, request.param, "best_fit")
    return given


@pytest.fixture(scope="module")
def alone(rows: dict[str, list[Batch]]) -> dict[str, Found]:
    cells = [(model, rows["unpacked"]) for model in MODELS.values()]
    return dict(zip(MODELS, run_ranks(looks, 1, cells)[0], strict=True))


def close(ours: dict[tuple[int, ...], float], theirs: dict[tuple[int, ...], float]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[key] == pytest.approx(theirs[key], rel=1e-6) for key in theirs)


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.more) if n == 4 else n for n in LAYOUTS])
def test_each_document_has_the_loss_it_has_alone(
    world_size: int, rows: dict[str, list[Batch]], alone: dict[str, Found]
) -> None:
    assert len(rows["best_fit"][0].tokens) == 2 and len(rows["unpacked"][0].tokens) == 5
    cells = [
        (name, {**model, **layout})
        for name, model in MODELS.items()
        for layout in LAYOUTS[world_size]
        # It gives no gradient to biases, caps no logits, and has no sinks.
        if name not in ("rpe", "options", "sinks") or layout.get("attention_backend") != "flash"
    ]
    ranks = run_ranks(looks, world_size, [(values, rows["best_fit"]) for _, values in cells])
    for n, (name, values) in enumerate(cells):
        for rank in ranks:
            assert len(rank[n].losses) == len(LENGTHS)
            assert close(rank[n].losses, alone[name].losses), f"{name} {values}"
            torch.testing.assert_close(rank[n].step.loss, alone[name].step.loss, rtol=1e-6, atol=0)
        args = small(**{**values, "model_parallel_size": 1, "pipe_parallel_size": 0})
        same_gradients(args, [rank[n].step for rank in ranks], alone[name].step)


def same_gradients(args: Any, ours: list[Step], theirs: Step) -> None:
    before, expected = random_weights(args), whole_weights(args, [theirs])
    for (layer, name), after in whole_weights(args, ours).items():
        gradient: Tensor = before[layer][name] - expected[layer, name]
        allowed = 1e-5 * gradient.norm() + 1e-7 * before[layer][name].norm()
        assert (after - expected[layer, name]).norm() <= allowed, f"{layer} {name}"


def test_without_resets_documents_see_each_other(rows: dict[str, list[Batch]]) -> None:
    """The same rows, not told apart: other losses, so that the tests above compare something."""
    blind = [
        Batch(plain.tokens, best_fit.labels, best_fit.loss_weights, cu_seqlens=best_fit.cu_seqlens)
        for plain, best_fit in zip(rows["leaking"], rows["best_fit"], strict=True)
    ]
    cells = [(MODELS["neox"], blind), (MODELS["neox"], rows["best_fit"]), (MODELS["learned"], blind)]
    no_positions, right, learned = run_ranks(looks, 1, cells)[0]
    assert close(no_positions.losses, right.losses), "rotary positions are relative: the mask alone does it"
    assert not close(learned.losses, right.losses)
    assert all(batch.positions is None and batch.cu_seqlens is None for batch in rows["leaking"])
