"""The columns of context ranks, beside every pair of query and key of a row, by definition."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron.data import Batch
from megatron.data.batch import ContextPart, QueryRuns, document_starts
from megatron.data.context_parts import ContextLayout, part_of

ROWS = 2
LAYOUTS = [(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)]


class Parts(NamedTuple):
    """The parts of all ranks, their columns, and the number of each token's document `[rows, seq]`."""

    columns: list[np.ndarray]
    ranks: list[ContextPart]
    documents: np.ndarray


def parts_of(seq: int, size: int, ulysses: int, seed: int) -> Parts:
    """seed: of the documents; 0: whole rows."""
    begins = np.random.default_rng(seed).random((ROWS, seq)) < (0.2 if seed else 0.0)
    tokens = torch.arange(ROWS * seq).view(ROWS, seq)
    batch = Batch(tokens, tokens, torch.ones_like(tokens), documents=document_starts(begins) if seed else None)
    layout = ContextLayout(size, ulysses, is_ring=True)
    ranks = [part_of(batch, layout, rank).context for rank in range(size)]
    begins[:, 0] = True
    columns = layout.columns_of_ranks(begins)
    return Parts(columns, ranks, begins.ravel().cumsum().reshape(ROWS, seq))  # type: ignore[arg-type]


def pairs_of(runs: QueryRuns, is_causal: bool) -> Iterator[tuple[int, list[int]]]:
    """Each query of the runs, by its place in them, and the places of its keys."""
    starts, key_starts, key_places = runs.cu_seqlens.tolist(), runs.key_starts.tolist(), runs.key_places.tolist()
    assert key_starts[-1] == len(key_places), "kernels leave the gradients of other keys undefined"
    for start, end, begin, stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        assert end - start <= runs.max_seqlen and stop - begin <= runs.max_keys
        for query in range(start, end):
            yield query, key_places[begin : stop - (end - 1 - query if is_causal else 0)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("size", "ulysses"), LAYOUTS)
@pytest.mark.parametrize("seq", [16, 13, 5, 3, 1, 40])
def test_every_query_sees_its_keys_once(seq: int, size: int, ulysses: int, seed: int) -> None:
    all_columns, ranks, documents = parts_of(seq, size, ulysses, seed)
    laid_out = torch.cat([part.columns for part in ranks])
    assert all(laid_out[part.order].tolist() == list(range(seq)) for part in ranks)
    groups = [np.sort(np.concatenate(all_columns[i : i + ulysses])) for i in range(0, size, ulysses)]
    for rank, part in enumerate(ranks):
        mask = part.token_mask if part.token_mask is not None else torch.ones(len(part.columns), dtype=torch.bool)
        assert part.columns[mask].tolist() == [c for c in all_columns[rank] if c < seq]
        if part.heads is not None:
            members = torch.cat([ranks[r].columns for r in range(rank // ulysses * ulysses, rank)] or [laid_out[:0]])
            members = torch.cat([members, *(ranks[r].columns for r in range(rank, (rank // ulysses + 1) * ulysses))])
            columns = members[part.heads.order]
            assert (columns.diff() >= 0).all() and torch.equal(columns[part.heads.places], members)
        if part.keys is None:
            assert ulysses == size and columns.tolist() == list(range(seq))
            continue
        queries = part.keys.queries.tolist()
        filled, number = sum(groups[rank // ulysses] < seq), rank // ulysses
        keys_by_query: dict[int, list[int]] = dict(pairs_of(part.keys.runs, is_causal=True))
        in_ring: dict[int, list[int]] = {query: [] for query in keys_by_query}
        for step, block in enumerate(part.keys.blocks):
            keys = groups[(number - step) % len(groups)]
            for place, places in pairs_of(block.runs, is_causal=step == 0):
                in_ring[int(block.query_places[place])] += [i // len(keys) * seq + keys[i % len(keys)] for i in places]
        for query, keys_seen in keys_by_query.items():
            row, place = divmod(query, len(queries))
            if place >= filled:
                assert keys_seen and not in_ring[query], "padding attends to something, and not in a ring"
                continue
            column = queries[place]
            expected = [row * seq + k for k in range(column + 1) if documents[row, k] == documents[row, column]]
            assert keys_seen == expected and sorted(in_ring[query]) == expected


def test_starts_of_chunks_begin_documents() -> None:
    """The last of two ranks has chunks 1 and 2 of four, which are neighbours."""
    _, ranks, _ = parts_of(16, 2, 1, 0)
    assert ranks[1].starts.tolist() == [0, 4, 8, 12, 16, 16, 16, 16]
