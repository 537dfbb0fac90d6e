"""Signatures by hand, planted pairs, clusters by datasketch and networkx, and torch bit for bit."""

import random

import networkx
import numpy as np
import pytest
import torch
from datasketch import MinHash as DatasketchMinHash
from datasketch import MinHashLSH
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.cleaning import minhash
from megatron.data.cleaning.minhash import MinHash, clusters, hashed_shingles, pairs_of, signatures, torch_signatures
from megatron.data.cleaning.shingles import WordHashes, shingles
from tests.data.cleaning.corpus import documents

METHOD = MinHash()


def sentence(draw: random.Random, words: int) -> list[str]:
    """Draws words of letters alone, since numbers count as one word."""
    return ["".join(draw.choices("abcdefgh", k=6)) for _ in range(words)]


def planted(count: int, seed: int) -> tuple[list[str], set[tuple[int, int]]]:
    """Texts, and pairs with a Jaccard similarity of 0.95 and more: a word of 400 differs, or some miss.
    All others have one of 0.05 at most."""
    draw, texts, pairs = random.Random(seed), list[str](), set[tuple[int, int]]()
    for _ in range(count):
        words = sentence(draw, draw.randrange(420, 600))
        texts.append(" ".join(words))
        if draw.random() < 0.5:
            if draw.random() < 0.5:
                words[draw.randrange(len(words))] = "another"
            else:
                words = words[draw.randrange(1, 10) :]
            pairs.add((len(texts) - 1, len(texts)))
            texts.append(" ".join(words))
        else:  # one that shares a beginning, with a similarity of at most 0.05
            texts.append(" ".join(words[: len(words) // 12] + sentence(draw, len(words))))
    return texts, pairs


def jaccard(text_a: str, text_b: str) -> float:
    sets = [{tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (text_a.split(), text_b.split())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def groups(signature: np.ndarray, has_shingles: np.ndarray) -> set[frozenset[int]]:
    """Clusters of the pairs of all bands."""
    edges = [np.empty((0, 2), np.int64)]
    for keys in minhash.band_keys(signature, METHOD)[has_shingles].T:
        order = np.argsort(keys, kind="stable")
        edges.append(pairs_of(keys[order], np.flatnonzero(has_shingles)[order], False))
    nodes, roots = clusters(np.concatenate(edges))
    return {frozenset(nodes[roots == root].tolist()) for root in np.unique(roots)}


def test_signatures_are_the_least_of_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*documents(60, seed=5), "", "four words are few", " ".join(sentence(random.Random(0), 3000))]
    values, counts = hashed_shingles(texts, WordHashes(), 5)
    factors, summands = METHOD.functions()
    assert (factors & 1).all() and len(set(factors.tolist())) == 112
    ends = np.cumsum(counts)
    expected = np.full((len(texts), 112), 2**31 - 1, np.int32)
    for text, (end, count) in enumerate(zip(ends, counts, strict=True)):
        for value in values[end - count : end].astype(np.int64).tolist():
            hashed = (value * factors.astype(np.int64) + summands) & 0xFFFFFFFF
            expected[text] = np.minimum(expected[text], hashed.astype(np.uint32).view(np.int32))
    for block in (7, 8192):
        monkeypatch.setattr(minhash, "_BLOCK", block)
        assert np.array_equal(signatures(values, counts, METHOD), expected)


def test_torch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; tests/gpu does the same on a GPU."""
    monkeypatch.setattr(minhash, "_GPU_BLOCK", 1000)
    values, counts = hashed_shingles([*documents(60, seed=6), "", "too short"], WordHashes(), 5)
    actual = torch_signatures(values, counts, METHOD, torch.device("cpu"))
    assert np.array_equal(actual, signatures(values, counts, METHOD))


def test_shingles_stay_within_their_text() -> None:
    hashes, texts = WordHashes(), [*documents(20, seed=7), "a b", "", "one two three four five", "x"]
    joint_shingles, counts = shingles(*hashes.hash_words(texts), 5)
    separate_shingles = [shingles(*hashes.hash_words([text]), 5)[0] for text in texts]
    assert counts.tolist() == list(map(len, separate_shingles)) and np.array_equal(
        joint_shingles, np.concatenate(separate_shingles)
    )
    assert counts[-2] == 1 and not counts[-1]


def test_words_of_ascii_are_hashed_as_all_others() -> None:
    """By tables of bytes, where other texts are normalised as texts; and a text longer than a block."""
    hashes = WordHashes()
    for text in [*documents(40, seed=12), "A-b_c  1,000.25 x9y\t\x1cEND.", "word " * 40_000, "x" * 200_000]:
        ascii_text = text.encode("ascii", "replace").decode()
        fast, slow = hashes.hash_words([ascii_text])[0], hashes.hash_words([f"{ascii_text} é"])[0][:-1]
        assert np.array_equal(fast, slow) and len(fast) == len(hashes.words(ascii_text))
    distinct = sorted({word for text in documents(300, seed=13) for word in hashes.words(text)})
    assert len(np.unique(hashes.hash_words([" ".join(distinct)])[0])) == len(distinct) > 2000


@pytest.mark.parametrize("corpus", ["planted", "damaged"])
def test_clusters_are_datasketch_s(corpus: str) -> None:
    """Clusters equal those of its LSH, on our signatures and on its own; planted pairs come back."""
    if corpus == "planted":
        texts, pairs = planted(150, 9)
        assert all(jaccard(texts[left], texts[right]) >= 0.95 for left, right in pairs)
        neighbour_similarities = [
            jaccard(texts[i], texts[i + 1]) for i in range(len(texts) - 1) if (i, i + 1) not in pairs
        ]
        assert 0.03 < max(neighbour_similarities) <= 0.05
    else:
        draw, texts = random.Random(1), documents(150, seed=8)
        texts += [text[draw.randrange(40) :] for text in texts if draw.random() < 0.5]
    values, counts = hashed_shingles(texts, WordHashes(), 5)
    signature = signatures(values, counts, METHOD)
    actual_groups = groups(signature, counts > 0)
    assert len(actual_groups) > 20

    def datasketch_groups(min_hashes: list[DatasketchMinHash | None]) -> set[frozenset[int]]:
        index, graph = MinHashLSH(num_perm=112, params=(14, 8)), networkx.Graph()
        for number, min_hash in enumerate(min_hashes):
            if min_hash is not None:
                graph.add_edges_from((number, neighbour) for neighbour in index.query(min_hash))
                index.insert(number, min_hash)
        return {frozenset(group) for group in networkx.connected_components(graph)}

    megatron_hashes = [
        DatasketchMinHash(112, hashvalues=row.view(np.uint32).astype(np.uint64), scheme="affine32") if count else None
        for row, count in zip(signature, counts, strict=True)
    ]
    assert datasketch_groups(megatron_hashes) == actual_groups
    if corpus == "planted":
        hashes, datasketch_hashes = WordHashes(), list[DatasketchMinHash | None]()
        for text in texts:
            words = hashes.words(text)
            datasketch_hashes.append(DatasketchMinHash(112))
            datasketch_hashes[-1].update_batch([" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)])  # type: ignore[union-attr]
        assert datasketch_groups(datasketch_hashes) == actual_groups == {frozenset(pair) for pair in pairs}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60))
def test_clusters_are_connected_components(edges: list[tuple[int, int]]) -> None:
    pairs = [edge for edge in edges if edge[0] != edge[1]]
    graph = networkx.Graph(pairs)
    nodes, roots = clusters(np.array(pairs, np.uint64).reshape(-1, 2))
    expected = {node: min(group) for group in networkx.connected_components(graph) for node in group}
    assert dict(zip(nodes.tolist(), roots.tolist(), strict=True)) == expected


def test_pairs_of_a_bucket() -> None:
    keys, numbers = np.array([1, 1, 1, 2, 3, 3]), np.array([4, 5, 9, 1, 2, 7])
    assert pairs_of(keys, numbers, False).tolist() == [[2, 7], [4, 5], [4, 9]]
    assert pairs_of(keys, numbers, True).tolist() == [[2, 7], [4, 5], [4, 9], [5, 9]]
    assert not len(pairs_of(keys[:0], numbers[:0], True))
