"""Packed documents mean the same in every layout, and do not see each other."""

from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data import Batch, IndexedDataset, IndexedDatasetWriter
from megatron.data.batch import collate, collate_samples
from megatron.data.index_maps import Packing
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import build_maps
from megatron.model import Stage
from megatron.model.attention import document_mask
from megatron.objectives import label_logprobs
from tests.model.runs import MODELS, Step, assert_steps, sgd_steps
from tests.model.stages import documents, gradients, make_stage, small
from tests.pool import run_ranks

TP2, PP2, SP = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}, {"sequence_parallel": True}
RECOMPUTE = {"checkpoint_activations": True}
# Of each number of ranks; models take the entries in turn, so that each runs on both axes.
LAYOUTS: dict[int, list[list[dict[str, Any]]]] = {
    1: [[RECOMPUTE], [RECOMPUTE | {"checkpoint_num_layers": 3}]],
    2: [[TP2 | SP, PP2 | RECOMPUTE], [TP2 | SP | RECOMPUTE, PP2], [TP2, PP2 | RECOMPUTE]],
    4: [[TP2 | PP2], [TP2 | PP2 | SP]],
}
LENGTHS = (5, 17, 2, 9, 6, 4, 8, 6, 3, 7)


def logprobs_of(stage: Stage, batch: Batch) -> Tensor:
    """`[batch, seq]`."""
    return stage(None, batch, partial(label_logprobs, batch=batch, group=None))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def references() -> list[Step]:
    return run_ranks(sgd_steps, 1, list(MODELS.values()))[0]


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.product) if n == 4 else n for n in LAYOUTS])
def test_every_layout_equals_one_process(world_size: int, references: list[Step]) -> None:
    turns = LAYOUTS[world_size]
    models = zip(cycle(turns), MODELS.values(), references, strict=False)
    assert_steps([({**model, **layout}, step) for layouts, model, step in models for layout in layouts], world_size)


def test_document_mask() -> None:
    starts = torch.tensor([0, 2, 3, 6, 12, 12, 12, 12], dtype=torch.int32)
    expected = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    for row, bounds in enumerate(([0, 2, 3, 6], [0, 6])):
        for query in range(6):
            begin = max(start for start in bounds if start <= query)
            expected[row, 0, query, begin : query + 1] = True
    assert torch.equal(document_mask(starts, 2, 6), expected)


def test_resets_of_the_data_separate_the_documents_of_a_packed_row() -> None:
    """Logits and gradients, from an end-of-document token to the model, with all kinds of positions."""
    rows = torch.randint(1, 64, (2, 17), generator=torch.Generator().manual_seed(5)).numpy()
    rows[0, [3, 9, 10]] = 0  # documents of 4, 6, 1 and 5 tokens: the first may be the rest of one
    rows[1, [0, 15, 16]] = 0  # of 1 and 15 tokens, whose end is also the row's
    resets = partial(collate, eod=0, reset_attention_mask=True, reset_position_ids=True)
    for name, values in MODELS.items():
        args = small(**values)
        stage, packed = make_stage(args), resets(rows)
        starts = [(row, begin) for row, begin, _ in documents(packed)]
        assert starts == [(0, 0), (0, 4), (0, 10), (0, 11), (1, 0), (1, 1)]
        logprobs = logprobs_of(stage, packed) * packed.loss_weights
        logprobs.sum().backward()
        packed_gradients = gradients(stage)
        stage.zero_grad()
        blind = logprobs_of(stage, replace(packed, documents=None)) * packed.loss_weights
        for row, begin, end in documents(packed):
            # The document after it is not predicted
            unpacked = collate(rows[row : row + 1, begin : end + 1])
            expected = logprobs_of(stage, unpacked)[0]
            expected = expected * packed.loss_weights[row, begin:end]
            assert packed.loss_weights[row, begin:end].sum() == end - begin - (rows[row, end - 1] == 0)
            torch.testing.assert_close(logprobs[row, begin:end], expected, rtol=1e-5, atol=1e-5)
            if begin and expected.any():
                assert (blind[row, begin:end] - expected).abs().max() > 1e-3, f"{name}: boundaries make no difference"
            expected.sum().backward()
        for parameter, gradient in gradients(stage).items():
            difference = (packed_gradients[parameter] - gradient).norm()
            assert difference <= 1e-5 * gradient.norm() + 1e-7, f"{name}: {parameter}"


def laid_out(folder: Path, labelled: bool, pack_impl: str) -> Batch:
    """All documents as a run reads them, ended by EOD; the first third of labelled ones is masked."""
    random = np.random.default_rng(1)
    rows = [[*random.integers(1, 64, n - 1), 0] for n in LENGTHS]
    sets = []
    for name in ("text", "label") if labelled else ("text",):
        with IndexedDatasetWriter(f"{folder}/{name}", np.int32) as writer:
            for row in rows:
                masked = len(row) // 3 if name == "label" else 0
                writer.add_document(np.array([-100] * masked + row[masked:], np.int32))
        sets.append(IndexedDataset(f"{folder}/{name}"))
    text, labels, packing = sets[0], sets[1] if labelled else None, Packing(pack_impl)
    maps = build_maps(text.sizes, 0, len(text), 1, 16, 3, packing, labels)
    data = PackedDataset(text, maps, 16, 64, packing=packing, labels=labels)
    resets = {"eod": 0, "reset_attention_mask": True, "reset_position_ids": True}
    return collate_samples([data[i] for i in range(len(data))], **resets)


@pytest.mark.parametrize("labelled", [False, True], ids=["lm", "sft"])
def test_rows_of_best_fit_give_each_document_the_loss_it_has_alone(labelled: bool, tmp_path: Path) -> None:
    """The gradient of all of them is also equal, for each kind of positions."""
    for name in ("neox", "learned", "moe"):
        results = []
        for pack_impl, rows in (("unpacked", 10), ("best_fit", 4)):
            args = small(**MODELS[name])
            stage, batch = make_stage(args), laid_out(tmp_path, labelled, pack_impl)
            trained = sum(n - max(n // 3 if labelled else 0, 1) for n in LENGTHS)
            assert len(batch.tokens) == rows and batch.loss_weights.sum() == trained
            losses = logprobs_of(stage, batch) * batch.loss_weights
            losses.sum().backward()
            spans = [(row, slice(begin, end)) for row, begin, end in documents(batch)]
            spans = [(row, span) for row, span in spans if batch.tokens[row, span].any()]  # else it is padding
            begins = [tuple(batch.tokens[row, span][:2].tolist()) for row, span in spans]
            assert len(set(begins)) == len(LENGTHS)
            sums = [losses[row, span].sum().detach() for row, span in spans]
            results.append((dict(zip(begins, sums, strict=True)), gradients(stage)))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)
