"""Rows of a batch cut into shorter ones (`seq_curriculum`)."""

from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import check_curriculum, row_length, step_length
from megatron.data.batch import collate, rechunk
from megatron.data.packed_dataset import PackedDataset
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.data.test_loader import one_rank_loader

BASE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 64, "max_position_embeddings": 64,
        "seq_curriculum": {"seq_len": [16, 32, 64], "until": [3, 5]}}  # fmt: skip
RESETS = {"reset_attention_mask": True, "reset_position_ids": True}


def test_lengths_of_the_phases():
    args = NeoXArgs.from_dict(BASE)
    assert [row_length(args, step) for step in range(1, 8)] == [16, 16, 16, 32, 32, 64, 64]
    assert {step_length(args, step) for step in range(1, 8)} == {64}  # nothing is left out
    assert row_length(NeoXArgs.from_dict({**BASE, "seq_curriculum": None}), 1) == 64


@pytest.mark.parametrize(("changes", "message"), [
    ({"seq_curriculum": {"seq_len": [16, 24], "until": [3]}}, "seq_len: 24 .*seq_length"),
    ({"seq_curriculum": {"seq_len": [0, 64], "until": [3]}}, "seq_curriculum.seq_len: 0 "),
    ({"seq_curriculum": {"seq_len": [16, 64], "until": [3, 5]}}, "until: .*1 .*2 phases"),
    ({"seq_curriculum": {"seq_len": [16, 32, 64], "until": [5, 5]}}, "until: .*increasing"),
    ({"seq_curriculum": {"seq_len": [16, 64]}}, "seq_curriculum.until: .*required"),
    ({"pack_impl": "unpacked"}, "seq_curriculum: .*pack_impl: packed"),
])  # fmt: skip
def test_phases_that_cannot_be(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        NeoXArgs.from_dict(BASE | changes)


def test_tensor_ranks_share_every_row():
    parallel = {"model_parallel_size": 2, "sequence_parallel": True}
    check_curriculum(NeoXArgs.from_dict(BASE | parallel))
    odd = {"seq_length": 30, "seq_curriculum": {"seq_len": [15, 30], "until": [3]}}
    with pytest.raises(ConfigError, match=r"seq_curriculum.seq_len: .* 2 ranks.* 15"):
        check_curriculum(NeoXArgs.from_dict(BASE | parallel | odd))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_row_is_as_if_it_had_been_cut_so(data: st.DataObject):
    """Against collating the shorter windows; the first place of a row begins a document either way."""
    length, pieces, rows = (data.draw(st.integers(1, n)) for n in (7, 4, 3))
    seq = length * pieces
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    samples = random.integers(0, 4, (rows, seq + 1))
    short = np.stack([row[i : i + length + 1] for row in samples for i in range(0, seq, length)])
    options = {"eod": 0, "eod_mask_loss": True, **RESETS}
    rechunked, expected = rechunk(collate(samples, **options, seed=5), length), collate(short, **options, seed=5)
    assert rechunked.seed == expected.seed
    for name in ("tokens", "labels", "loss_weights", "positions", "documents.cu_seqlens"):
        actual_value, expected_value = map(attrgetter(name), (rechunked, expected))
        assert torch.equal(actual_value, expected_value) and actual_value.dtype == expected_value.dtype, name
    assert rechunked.documents.max_seqlen == expected.documents.max_seqlen
    documents = int((expected.positions == 0).sum())
    assert documents < len(rechunked.documents.cu_seqlens) <= min(2 * documents, rows * seq + 1)
    places = replace(collate(samples), filled=torch.from_numpy(random.integers(0, seq + 1, rows)))
    filled_before, rechunked_places = places.filled_places(), rechunk(places, length).filled_places()
    assert torch.equal(rechunked_places.t().flatten(), filled_before.t().flatten())
    no_resets = rechunk(collate(samples), length)
    assert (
        no_resets.positions is None
        and no_resets.documents is None
        and no_resets.tokens.shape == (rows * pieces, length)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_hold_the_tokens_of_the_run_without_it(dataset: PackedDataset, workers: int):
    def batches(**options: Any) -> list[Any]:
        return list(one_rank_loader(dataset, workers, {"eod_mask_loss": True, **RESETS}, eod=50, **options))

    full, rechunked = batches(), batches(length=lambda n: (2, 4, 8)[min(n, 2)], split_rows=True)
    shapes = [{tuple(batch.tokens.shape) for batch in step} for step in rechunked[:3]]
    assert shapes == [{(8, 2)}, {(4, 4)}, {(2, 8)}] and {len(step) for step in rechunked[:3]} == {4}
    for actual, expected in zip(sum(rechunked, []), sum(full, []), strict=True):
        assert torch.equal(actual.tokens.flatten(), expected.tokens.flatten()) and actual.seed == expected.seed
        assert torch.equal(actual.labels.flatten(), expected.labels.flatten())
    # Inside a phase, from the second step on
    resumed = batches(length=lambda n: (4, 8)[min(n, 1)], split_rows=True, consumed_samples=8)
    for actual, expected in zip(sum(resumed, []), sum(rechunked[1:], []), strict=True):
        assert torch.equal(actual.tokens, expected.tokens) and torch.equal(
            actual.documents.cu_seqlens, expected.documents.cu_seqlens
        )
