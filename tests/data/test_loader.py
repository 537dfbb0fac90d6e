"""Batches: their content, their order over layouts and restarts, and that none outlives its use."""

import gc
import multiprocessing
import os
import signal
import weakref
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data import DataError, IndexedDataset, build_blend, build_packed, collation, eval_batches, train_loader
from megatron.data.batch import collate, collate_samples
from megatron.data.blending import BlendedDataset
from megatron.data.loader import micro_batch_seed
from megatron.data.packed_dataset import PackedDataset
from tests.data.samples import plain_args, write_rows

SEQ = 8


def make_args(micro: int = 2, size: int = 1, workers: int = 0, **changes):
    steps = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 8 // (micro * size)}
    return plain_args(**{"train_batch_size": 8, "seed": 7, "num_workers": workers} | steps | changes)


def test_collate_shifts_labels_by_one():
    batch = collate(np.arange(18).reshape(2, 9))
    assert batch.tokens.dtype == batch.labels.dtype == batch.loss_weights.dtype == torch.int64
    assert torch.equal(batch.tokens[1], torch.arange(9, 17)) and torch.equal(batch.labels[1], torch.arange(10, 18))
    assert batch.loss_weights.tolist() == [[1] * 8] * 2
    assert batch.positions is None and batch.documents is None


def test_eod_mask_loss_masks_where_the_input_is_eod():
    samples = np.array([[5, 0, 6, 7, 0]])
    assert collate(samples, eod=0, eod_mask_loss=False).loss_weights.tolist() == [[1, 1, 1, 1]]
    batch = collate(samples, eod=0, eod_mask_loss=True)
    # The eod itself is still predicted; the token after it is not
    assert batch.loss_weights.tolist() == [[1, 0, 1, 1]]
    assert batch.labels.tolist() == [[0, 0, 7, 0]]
    with pytest.raises(ValueError, match="end-of-document"):
        collate(samples, eod_mask_loss=True)


def test_masked_ids_are_labels_and_no_inputs():
    assert collate(np.array([[5, 1, 5, 2]]), masked_ids=[5]).loss_weights.tolist() == [[1, 0, 1]]


def test_padding_is_counted_in_places_that_the_model_reads(dataset: PackedDataset):
    full = dataset[0]
    short = replace(full, filled=3)
    assert full.filled == SEQ + 1
    batch = collate_samples([full, short])
    assert batch.padding == SEQ - 3 and batch.filled is not None and batch.filled.tolist() == [SEQ, 3]


def test_moving_a_batch_keeps_what_is_no_tensor():
    batch = collate(np.arange(9)[None], seed=5)
    moved = batch.to("cpu").map(lambda tensor: tensor + 1)
    assert moved.seed == 5 and moved.positions is None
    assert torch.equal(moved.tokens, batch.tokens + 1) and torch.equal(moved.loss_weights, batch.loss_weights + 1)


@pytest.mark.parametrize(("micro", "size"), [(8, 1), (1, 1), (2, 2), (1, 4), (4, 2)])
def test_steps_hold_the_same_samples_in_every_layout(dataset: PackedDataset, micro: int, size: int):
    layout, options = make_args(micro, size), {"data_size": size, "consumed_samples": 8}
    loaders = [train_loader(dataset, layout, data_rank=rank, **options) for rank in range(size)]
    steps = list(zip(*loaders, strict=True))
    assert len(steps) == len(dataset) // 8 - 1
    for number, ranks in enumerate(steps, start=1):
        assert all(len(micro_batches) == 8 // (micro * size) for micro_batches in ranks)
        rows = [row for m in zip(*ranks, strict=True) for batch in m for row in batch.tokens.tolist()]
        assert rows == [dataset[i].tokens[:-1].tolist() for i in range(8 * number, 8 * number + 8)]


def one_rank_loader(dataset, workers: int = 0, changes: dict | None = None, **options):
    """The loader of the only rank. changes: of the configuration."""
    return train_loader(dataset, make_args(workers=workers, **(changes or {})), data_rank=0, data_size=1, **options)


def _flat(loader) -> list[tuple[list, list, int]]:
    return [(batch.tokens.tolist(), batch.labels.tolist(), batch.seed) for batch in chain(*loader)]


@pytest.mark.parametrize("blended", [False, True])
def test_a_restart_goes_on_where_it_stopped_also_with_other_workers(dataset: PackedDataset, blended: bool):
    if blended:
        dataset = BlendedDataset((dataset, dataset), build_blend([3, 1], 56))
    all_steps = _flat(one_rank_loader(dataset))
    rows = [row for tokens, _, _ in all_steps for row in tokens]
    assert rows == [dataset[i].tokens[:-1].tolist() for i in range(len(rows))] and len(rows) > 40
    for workers in (0, 2):
        assert _flat(one_rank_loader(dataset, workers, consumed_samples=24)) == all_steps[3 * 4 :]


def test_seeds_are_a_function_of_run_and_sample(dataset: PackedDataset):
    seeds = [seed for _, _, seed in _flat(one_rank_loader(dataset))]
    assert seeds == [micro_batch_seed(7, sample) for sample in range(0, 2 * len(seeds), 2)]
    assert len(set(seeds)) == len(seeds) and micro_batch_seed(8, 0) != micro_batch_seed(7, 0)
    # Fixed: a resumed run must draw what the interrupted one would have drawn
    assert micro_batch_seed(1234, 0) == 6756851221116772109
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_loading_does_not_change_the_global_generator(dataset: PackedDataset):
    rng_state = torch.get_rng_state()
    _flat(one_rank_loader(dataset, workers=1))
    assert torch.equal(torch.get_rng_state(), rng_state)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_batch_outlives_its_step(dataset: PackedDataset, workers: int):
    """Upstream's loader kept every batch it ever yielded."""
    loader = one_rank_loader(dataset, workers)
    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        step = next(loader)
        for _ in range(3):
            old = [weakref.ref(batch) for batch in step] + [weakref.ref(batch.tokens) for batch in step]
            del step
            assert [ref() for ref in old] == [None] * len(old)
            step = next(loader)
        assert len(step) == 4
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["close", "drop", "exhaust"])
def test_workers_start_at_once_and_end_with_the_loader(dataset: PackedDataset, end: str):
    other_children = multiprocessing.active_children()
    loader = one_rank_loader(dataset, workers=2)
    workers = [worker for worker in multiprocessing.active_children() if worker not in other_children]
    assert len(workers) == 2
    if end == "exhaust":
        list(loader)
    else:
        next(loader)
    if end == "close":
        loader.close()  # type: ignore[attr-defined]
    del loader
    assert not [worker for worker in workers if worker.is_alive()]


def test_workers_survive_signals_meant_for_the_main_process(dataset: PackedDataset):
    other_children = multiprocessing.active_children()
    loader = one_rank_loader(dataset, workers=1)
    next(loader)
    [worker] = [worker for worker in multiprocessing.active_children() if worker not in other_children]
    for number in (signal.SIGINT, signal.SIGUSR1):
        os.kill(worker.pid, number)
    assert len(list(loader)) == len(dataset) // 8 - 1


@pytest.mark.gpu
def test_pinned_batches_reach_the_gpu(dataset: PackedDataset):
    pinned, pageable = (one_rank_loader(dataset, workers=1, pin_memory=pin) for pin in (True, False))
    for actual, expected in zip(chain(*pinned), chain(*pageable), strict=True):
        assert actual.tokens.is_pinned() and actual.seed == expected.seed
        assert torch.equal(actual.to("cuda").labels.cpu(), expected.labels)


def test_batch_arithmetic_that_does_not_add_up_is_refused(dataset: PackedDataset):
    with pytest.raises(DataError, match="train_batch_size 8 is not .* 2 x .* 4 x 2 data-parallel ranks"):
        train_loader(dataset, make_args(size=1), data_rank=0, data_size=2)


@pytest.mark.parametrize(("n", "micro", "size"), [
    (5, 4, 2), (5, 1, 8), (5, 8, 1), (16, 2, 4), (17, 2, 4), (0, 2, 2), (1000, 2, 4),
])  # fmt: skip
def test_evaluation_counts_every_sample_once(dataset: PackedDataset, n: int, micro: int, size: int):
    ranks = [list(eval_batches(dataset, n, micro, rank, size)) for rank in range(size)]
    assert len({len(batches) for batches in ranks}) == 1
    rows, n = [], min(n, len(dataset))
    for batch in (batch for batches in zip(*ranks, strict=True) for batch in batches):
        assert batch.tokens.shape == batch.labels.shape == batch.loss_weights.shape == (micro, SEQ)
        for tokens, labels, weights in zip(batch.tokens, batch.labels, batch.loss_weights, strict=True):
            assert weights.tolist() in ([1] * SEQ, [0] * SEQ)
            if weights[0]:
                rows.append([*tokens.tolist(), int(labels[-1])])
            else:
                assert not labels.any()
    assert rows == [dataset[i].tokens.tolist() for i in range(n)]


def test_evaluation_honours_eod_mask_loss(dataset: PackedDataset):
    eod = int(dataset[0].tokens[3])
    batch = next(eval_batches(dataset, 4, 4, 0, 1, partial(collate_samples, eod=eod, eod_mask_loss=True)))
    assert torch.equal(batch.loss_weights, (batch.tokens != eod).long())


def _with_foreign_token(prefix: Path, token: int) -> PackedDataset:
    """Ten documents of 20 tokens below 100, but token 15 of document 7 is `token`."""
    rows = np.random.default_rng(0).integers(0, 100, (10, 20)).astype(np.int32)
    rows[7, 15] = token
    indexed = IndexedDataset(write_rows(prefix, rows))
    return PackedDataset(indexed, build_packed(indexed.sizes, 0, 10, 24, SEQ, 3), SEQ, vocab_size=100)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("token", [100, 2_000_000_000, -1])
def test_a_token_outside_the_vocabulary_ends_training_at_its_step(tmp_path: Path, token: int, workers: int):
    dataset = _with_foreign_token(tmp_path / "x", token)
    bad_sample = next(i for i in range(24) if any(d == 7 and a <= 15 < a + count for d, a, count in dataset.pieces(i)))
    message = rf"^{tmp_path}/x\.bin: document 7 .*{token} .* 15\b.* 100 .*padded_vocab_size.*vocab_file.*$"
    for loader, size in ((one_rank_loader(dataset, workers), 8), (eval_batches(dataset, 24, 4, 0, 1), 4)):
        for _ in range(bad_sample // size):
            next(loader)
        # One line, also out of a worker: no traceback in the message
        with pytest.raises(DataError, match=message):
            next(loader)


@pytest.mark.parametrize("token", [0, 99])
def test_every_token_of_the_vocabulary_is_welcome(tmp_path: Path, token: int):
    dataset = _with_foreign_token(tmp_path / "x", token)
    assert len(_flat(one_rank_loader(dataset))) == len(dataset) // 8 * 4


def test_documents_of_a_batch_end_with_their_eod():
    samples = np.array([[5, 0, 6, 7, 0, 8], [0, 0, 3, 4, 5, 0]])
    batch = collate(samples, eod=0, reset_attention_mask=True, reset_position_ids=True)
    starts = batch.documents.cu_seqlens
    assert starts.dtype == torch.int32 and batch.positions.dtype == torch.int64
    assert starts.tolist() == [0, 2, 5, 6, 7, 10, 10, 10] and batch.documents.max_seqlen == 3
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    # What comes first in a document is not predicted from the one before
    assert batch.loss_weights.tolist() == [[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    single_reset = collate(samples, eod=0, reset_attention_mask=True)
    assert single_reset.positions is None and torch.equal(single_reset.documents.cu_seqlens, starts)
    single_reset = collate(samples, eod=0, reset_position_ids=True)
    assert (
        single_reset.loss_weights.all()
        and single_reset.documents is None
        and torch.equal(single_reset.positions, batch.positions)
    )
    for key in ("reset_attention_mask", "reset_position_ids"):
        with pytest.raises(ValueError, match="end-of-document"):
            collate(samples, **{key: True})


@pytest.mark.parametrize(
    "key, name", [("reset_attention_mask", "documents.cu_seqlens"), ("reset_position_ids", "positions")]
)
def test_loaders_reset_as_the_configuration_says(dataset: PackedDataset, key: str, name: str):
    eod, reset = int(dataset[0].tokens[3]), {key: True}
    expected = collate_samples([dataset[0], dataset[1]], eod=eod, **reset)
    evaluation = eval_batches(dataset, 2, 2, 0, 1, collation(make_args(**reset), eod))
    for batch in (next(one_rank_loader(dataset, 0, reset, eod=eod))[0], next(evaluation)):
        assert torch.equal(*map(attrgetter(name), (batch, expected)))
        assert (batch.positions is None) != (batch.documents is None)
