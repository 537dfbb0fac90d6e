"""Columns of packed rows: every rank has its number of them, and attention costs ranks about the same."""

import numpy as np
import pytest

from megatron.data.context_columns import _long_documents
from megatron.data.context_parts import ContextLayout


def pairs_of_ranks(begins: np.ndarray, columns: list[np.ndarray]) -> list[int]:
    """The pairs of query and key of each rank, counted one by one."""
    documents = begins.cumsum(1)
    visible = documents[:, :, None] == documents[:, None, :]
    visible &= np.tri(begins.shape[1], dtype=bool)
    return [int(visible[:, part[part < begins.shape[1]]].sum()) for part in columns]


def begins_at(seq: int, *starts: int) -> np.ndarray:
    begins = np.zeros((1, seq), bool)
    begins[0, [0, *starts]] = True
    return begins


def random_begins(seed: int, rows: int, seq: int) -> np.ndarray:
    """Rows of documents, most of them short and some long."""
    generator = np.random.default_rng(seed)
    begins = np.zeros((rows, seq), bool)
    for row in begins:
        ends = generator.lognormal(3, 1.3, seq).astype(int).clip(1).cumsum()
        row[[0, *ends[ends < seq]]] = True
    return begins


def test_two_chunks_without_documents() -> None:
    """Causal attention costs every rank the same: a chunk at the head of the row, one at its tail."""
    columns = ContextLayout(4).columns_of_ranks(begins_at(64))
    assert [part.tolist() for part in columns] == [ContextLayout(4).columns(64, rank).tolist() for rank in range(4)]
    assert len(set(pairs_of_ranks(begins_at(64), columns))) == 1
    assert [len(ContextLayout(4, multiple=6).columns(61, rank)) % 6 for rank in range(4)] == [0] * 4


def test_each_document_on_one_rank() -> None:
    """Two documents on two ranks; chunks would cut both."""
    columns = ContextLayout(2).columns_of_ranks(begins_at(64, 24, 48, 56))
    documents = [set(range(start, end)) for start, end in ((0, 24), (24, 48), (48, 56), (56, 64))]
    for part in columns:
        assert all(document <= set(part) or not document & set(part) for document in documents)
    assert len(set(pairs_of_ranks(begins_at(64, 24, 48, 56), columns))) == 1


def test_a_long_document_is_divided_over_all_ranks() -> None:
    """A document fills half of the row; of two chunks each, ranks 1 and 2 would have the most of it."""
    begins = begins_at(256, 128, 160, 192, 224)
    costs = pairs_of_ranks(begins, ContextLayout(4).columns_of_ranks(begins))
    chunks = pairs_of_ranks(begins, [ContextLayout(4).columns(256, rank) for rank in range(4)])
    assert max(costs) <= 1.02 * np.mean(costs) and max(chunks) > 1.3 * np.mean(chunks)


def test_many_documents_are_joined_to_few() -> None:
    starts = np.array([0, 3, 4, 9, 10, 11, 30, 31, 33])
    assert _long_documents(starts, 40, 5).tolist() == [0, 4, 9, 10, 11, 30, 33]
    assert _long_documents(starts, 40, 1) is starts
    begins = np.ones((1, 4096 * 8), bool)
    costs = [len(part) for part in ContextLayout(4).columns_of_ranks(begins)]
    assert costs == [4096 * 2] * 4


@pytest.mark.parametrize(("size", "ulysses", "multiple"), [(2, 1, 1), (4, 1, 6), (8, 1, 1), (4, 2, 1), (8, 2, 4)])
def test_random_rows_are_balanced(size: int, ulysses: int, multiple: int) -> None:
    layout, ratios = ContextLayout(size, ulysses, multiple=multiple), []
    for seed in range(20):
        begins = random_begins(seed, rows=1 + seed % 3, seq=509)
        columns = layout.columns_of_ranks(begins)
        chunks = [layout.columns(509, rank) for rank in range(size)]
        assert [len(part) for part in columns] == [len(part) for part in chunks]
        assert np.sort(np.concatenate(columns)).tolist() == np.sort(np.concatenate(chunks)).tolist()
        assert all((np.diff(part) > 0).all() for part in columns)
        costs, chunk_costs = (
            [sum(pairs[i : i + ulysses]) for i in range(0, size, ulysses)]
            for pairs in (pairs_of_ranks(begins, columns), pairs_of_ranks(begins, chunks))
        )
        assert max(costs) <= max(chunk_costs)
        ratios.append(max(costs) / np.mean(costs))
    assert np.mean(ratios) < 1.1


def test_chunks_for_mamba() -> None:
    begins = begins_at(64, 24, 48, 56)
    columns = ContextLayout(2, keeps_documents=False).columns_of_ranks(begins)
    assert [part.tolist() for part in columns] == [ContextLayout(2).columns(64, rank).tolist() for rank in range(2)]
