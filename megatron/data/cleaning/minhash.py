"""MinHash (Broder 1997) with locality-sensitive hashing: documents whose runs of words overlap share a band
of their signatures. numpy and torch give the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron.data.cleaning.shingles import WordHashes, mixed, shingles
from megatron.data.cleaning.sorted_runs import groups

_BLOCK = 8192  # shingles at once: with all hash functions about the cache of a core
_GPU_BLOCK = 1 << 18
_MOST = np.int32(2**31 - 1)


@dataclass(frozen=True)
class MinHash:
    """How near-duplicates are found. ngrams: words of a run; bands of `rows` values each: two documents of
    Jaccard similarity s share one with probability 1 - (1 - s^rows)^bands (0.92 at 0.8, half at about 0.69).
    keep: which document of a cluster stays. jaccard: pairs below it are no duplicates though they share a
    band; None: whoever shares a band is."""

    ngrams: int = 5
    bands: int = 14
    rows: int = 8
    seed: int = 1
    keep: Literal["first", "longest", "best"] = "first"
    score: str | None = None
    jaccard: float | None = None

    def functions(self) -> tuple[np.ndarray, np.ndarray]:
        """Factors, all odd, and summands of the hash functions x -> a x + b modulo 2^32, as int32
        [bands x rows]."""
        numbers = np.arange(2 * self.bands * self.rows, dtype=np.uint64) + np.uint64(self.seed << 32)
        halves = (mixed(mixed(numbers)) >> np.uint64(32)).astype(np.uint32)
        factors, summands = np.split(halves, 2)
        return (factors | np.uint32(1)).view(np.int32), summands.view(np.int32)


def hashed_shingles(texts: Sequence[str], hashes: WordHashes, ngrams: int) -> tuple[np.ndarray, np.ndarray]:
    """The shingles of texts as int32 [shingles], and how many each text has [texts]."""
    values, counts = shingles(*hashes.of(texts), ngrams)
    return (values >> np.uint64(32)).astype(np.uint32).view(np.int32), counts


def signatures(values: np.ndarray, counts: np.ndarray, method: MinHash) -> np.ndarray:
    """The least value that each hash function has on the shingles of each text, as int32 [texts, functions];
    2^31 - 1 for a text without shingles.

    values, counts: of `hashed_shingles`.
    """
    factors, summands = (part[:, None] for part in method.functions())
    least = np.full((len(factors), len(counts)), _MOST)
    scratch = np.empty((len(factors), min(_BLOCK, len(values))), np.int32)
    for text, start, stop in _blocks(counts, _BLOCK):
        hashed = scratch[:, : stop - start[0]]
        np.multiply(values[None, start[0] : stop], factors, out=hashed)
        hashed += summands
        least_here = np.minimum.reduceat(hashed, start - start[0], axis=1)
        least[:, text] = np.minimum(least[:, text], least_here)
    return np.ascontiguousarray(least.T)


def torch_signatures(values: np.ndarray, counts: np.ndarray, method: MinHash, device: Any) -> np.ndarray:
    """The same as `signatures`, bit for bit, computed by torch on a device."""
    import torch

    factors, summands = (torch.from_numpy(part).to(device) for part in method.functions())
    least = torch.full((len(counts), len(factors)), int(_MOST), dtype=torch.int32, device=device)
    owners = np.repeat(np.arange(len(counts)), counts)
    for begin in range(0, len(values), _GPU_BLOCK):
        block = torch.from_numpy(values[begin : begin + _GPU_BLOCK].copy()).to(device)
        owner = torch.from_numpy(owners[begin : begin + _GPU_BLOCK]).to(device)
        hashed = block[:, None] * factors + summands  # wraps, as numpy's does
        least.scatter_reduce_(0, owner[:, None].expand_as(hashed), hashed, "amin")
    return least.cpu().numpy()


def band_keys(signature: np.ndarray, method: MinHash) -> np.ndarray:
    """A number for each band of each text [texts, bands], the same for the same values of the same band."""
    values = signature.view(np.uint32).reshape(len(signature), method.bands, method.rows).astype(np.uint64)
    keys = mixed(np.broadcast_to(np.arange(1, method.bands + 1, dtype=np.uint64), values.shape[:2]))
    for row in range(method.rows):
        keys = mixed(keys + values[:, :, row])
    return keys


def clusters(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents of edges [edges, 2], and for each the least document that edges lead to: union-find of
    all edges at once, each round hanging roots onto lesser ones and shortening the paths."""
    nodes, places = np.unique(edges, return_inverse=True)
    first, second = places.reshape(-1, 2).T
    parent = np.arange(len(nodes))
    while True:
        one, other = parent[first], parent[second]
        apart = one != other
        if not apart.any():
            return nodes, nodes[parent]
        first, second, one, other = first[apart], second[apart], one[apart], other[apart]
        np.minimum.at(parent, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(parent, parent[parent]):
            parent = parent[parent]


def pairs_of(keys: np.ndarray, documents: np.ndarray, neighbours: bool) -> np.ndarray:
    """Edges [edges, 2] between documents with the same key: each with the first of them and, with
    `neighbours`, with the one before it.

    keys, documents: in order of keys, and of documents where keys are the same.
    """
    begins, heads = groups(keys)
    later = np.flatnonzero(~begins)
    edges = np.stack([documents[heads[later]], documents[later]], axis=1)
    if neighbours:
        edges = np.concatenate([edges, np.stack([documents[later - 1], documents[later]], axis=1)])
    return np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)


def _blocks(counts: np.ndarray, size: int) -> "Sequence[tuple[np.ndarray, np.ndarray, int]]":
    """Shingles in blocks of about `size`: of each the texts in it, where their shingles begin, and where the
    block ends. A text of more shingles than that is in several."""
    owners = np.flatnonzero(counts)
    ends = np.cumsum(counts[owners])
    starts = ends - counts[owners]
    total = int(ends[-1]) if len(ends) else 0
    blocks = []
    for begin in range(0, total, size):
        stop = min(begin + size, total)
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(starts, stop, "left")
        blocks.append((owners[first:last], np.maximum(starts[first:last], begin), stop))
    return blocks
