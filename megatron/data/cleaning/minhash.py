"""Finds near-duplicates by MinHash (Broder 1997) with locality-sensitive hashing.

A text's signature is divided into bands; texts with many common shingles probably share a band. numpy and
torch compute the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron.data.cleaning.shingles import WordHashes, mixed, shingles
from megatron.data.cleaning.sorted_runs import groups

_BLOCK = 8192  # shingles hashed at once; with all hash functions they about fill a core's cache
_GPU_BLOCK = 1 << 18
_MAX_INT32 = np.int32(2**31 - 1)


@dataclass(frozen=True)
class MinHash:
    """Settings of near-duplicate detection. Two documents of Jaccard similarity s share a band with
    probability 1 - (1 - s^rows)^bands (0.92 at s = 0.8, half at about 0.69).

    ngrams: words per shingle.
    bands, rows: a signature is `bands` bands of `rows` values.
    keep: which document of a cluster is kept: the first, the longest, or the best by score.
    score: the field of a row that holds the score for keep "best".
    jaccard: pairs that share a band but have a lower Jaccard similarity are no duplicates; None: sharing a
      band is enough.
    """

    ngrams: int = 5
    bands: int = 14
    rows: int = 8
    seed: int = 1
    keep: Literal["first", "longest", "best"] = "first"
    score: str | None = None
    jaccard: float | None = None

    def functions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (factors a, summands b) of the hash functions x -> a x + b modulo 2^32, each int32 [bands x
        rows].

        All factors are odd.
        """
        numbers = np.arange(2 * self.bands * self.rows, dtype=np.uint64) + np.uint64(self.seed << 32)
        halves = (mixed(mixed(numbers)) >> np.uint64(32)).astype(np.uint32)
        factors, summands = np.split(halves, 2)
        return (factors | np.uint32(1)).view(np.int32), summands.view(np.int32)


def hashed_shingles(texts: Sequence[str], hashes: WordHashes, ngrams: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes of all shingles of `texts`, int32 [shingles]; number of shingles of each text [texts]).

    ngrams: words per shingle.
    """
    values, counts = shingles(*hashes.hash_words(texts), ngrams)
    return (values >> np.uint64(32)).astype(np.uint32).view(np.int32), counts


def signatures(values: np.ndarray, counts: np.ndarray, method: MinHash) -> np.ndarray:
    """Return the MinHash signature of each text: the minimum of each hash function over its shingles, int32
    [texts, functions].

    A text without shingles has 2^31 - 1 everywhere. values, counts: the result of `hashed_shingles`.
    """
    factors, summands = (part[:, None] for part in method.functions())
    minima = np.full((len(factors), len(counts)), _MAX_INT32)
    scratch = np.empty((len(factors), min(_BLOCK, len(values))), np.int32)
    for text, start, stop in _blocks(counts, _BLOCK):
        hashed = scratch[:, : stop - start[0]]
        np.multiply(values[None, start[0] : stop], factors, out=hashed)
        hashed += summands
        block_minima = np.minimum.reduceat(hashed, start - start[0], axis=1)
        minima[:, text] = np.minimum(minima[:, text], block_minima)
    return np.ascontiguousarray(minima.T)


def torch_signatures(values: np.ndarray, counts: np.ndarray, method: MinHash, device: Any) -> np.ndarray:
    """Return the same bits as `signatures`, computed with torch on `device`."""
    import torch

    factors, summands = (torch.from_numpy(part).to(device) for part in method.functions())
    minima = torch.full((len(counts), len(factors)), int(_MAX_INT32), dtype=torch.int32, device=device)
    owners = np.repeat(np.arange(len(counts)), counts)
    for begin in range(0, len(values), _GPU_BLOCK):
        block = torch.from_numpy(values[begin : begin + _GPU_BLOCK].copy()).to(device)
        owner = torch.from_numpy(owners[begin : begin + _GPU_BLOCK]).to(device)
        hashed = block[:, None] * factors + summands  # wraps, as numpy's does
        minima.scatter_reduce_(0, owner[:, None].expand_as(hashed), hashed, "amin")
    return minima.cpu().numpy()


def band_keys(signature: np.ndarray, method: MinHash) -> np.ndarray:
    """Return a hash for each band of each text's signature, [texts, bands].

    Two texts get the same hash for a band if they have the same values in it.
    """
    values = signature.view(np.uint32).reshape(len(signature), method.bands, method.rows).astype(np.uint64)
    keys = mixed(np.broadcast_to(np.arange(1, method.bands + 1, dtype=np.uint64), values.shape[:2]))
    for row in range(method.rows):
        keys = mixed(keys + values[:, :, row])
    return keys


def clusters(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group the documents that `edges` [edges, 2] connect; return (sorted documents, smallest document of
    each one's group).

    Union-find over all edges at once: each round links roots to smaller roots and shortens the paths.
    """
    nodes, places = np.unique(edges, return_inverse=True)
    left, right = places.reshape(-1, 2).T
    parent = np.arange(len(nodes))
    while True:
        left_root, right_root = parent[left], parent[right]
        is_unjoined = left_root != right_root
        if not is_unjoined.any():
            return nodes, nodes[parent]
        left, right, left_root, right_root = (end[is_unjoined] for end in (left, right, left_root, right_root))
        np.minimum.at(parent, np.maximum(left_root, right_root), np.minimum(left_root, right_root))
        while not np.array_equal(parent, parent[parent]):
            parent = parent[parent]


def pairs_of(keys: np.ndarray, documents: np.ndarray, neighbours: bool) -> np.ndarray:
    """Return edges [edges, 2] from the first document of each key to all other documents with this key.

    keys, documents: the key of each document, sorted by key, then by document.
    neighbours: also return edges between consecutive documents of a key.
    """
    begins, heads = groups(keys)
    followers = np.flatnonzero(~begins)
    edges = np.stack([documents[heads[followers]], documents[followers]], axis=1)
    if neighbours:
        edges = np.concatenate([edges, np.stack([documents[followers - 1], documents[followers]], axis=1)])
    return np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)


def _blocks(counts: np.ndarray, size: int) -> "Sequence[tuple[np.ndarray, np.ndarray, int]]":
    """Split shingles into blocks of about `size` shingles; a text with more shingles is in several blocks.

    counts: number of shingles of each text. Returns for each block: its texts, the start of each text's
      shingles, and the end of the block.
    """
    owners = np.flatnonzero(counts)
    ends = np.cumsum(counts[owners])
    starts = ends - counts[owners]
    total = int(ends[-1]) if len(ends) else 0
    blocks = []
    for begin in range(0, total, size):
        stop = min(begin + size, total)
        first_text, end_text = np.searchsorted(ends, begin, "right"), np.searchsorted(starts, stop, "left")
        blocks.append((owners[first_text:end_text], np.maximum(starts[first_text:end_text], begin), stop))
    return blocks
