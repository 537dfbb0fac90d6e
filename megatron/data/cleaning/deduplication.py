"""The passes that look at all documents together: exact duplicates, then near-duplicates among those left."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from megatron.data.cleaning.exact import LATER, later_ones, pieces, without, without_both
from megatron.data.cleaning.filtering import FILTERED, write_hashes
from megatron.data.cleaning.minhash import (
    MinHash,
    band_keys,
    clusters,
    hashed_shingles,
    pairs_of,
    signatures,
    torch_signatures,
)
from megatron.data.cleaning.plan import Work
from megatron.data.cleaning.row_files import read_rows
from megatron.data.cleaning.shingles import WordHashes, shingles
from megatron.data.cleaning.sorted_runs import document_numbers, groups, merged, rows_of_part, write_run
from megatron.data.files import map_npy

EXACT, MINHASH, PIECES = "exact", "minhash", "pieces"
NEAR, SAME, NOTHING_LEFT = "minhash/near_duplicate", "exact/document", "exact/nothing_left"
_TEXTS_AT_ONCE = 400
_EDGES_HELD = 4_000_000
_PAIRS_AT_ONCE = 100_000


@dataclass
class Candidate:
    """A document after the passes so far. reason, kept: of one that goes, and the number of the one that
    stays in its place. removed: pieces that were taken out of its text, by scope."""

    part: int
    row: int
    values: dict[str, Any]
    text: str
    reason: str | None = None
    kept: int | None = None
    removed: Mapping[str, Sequence[str]] = field(default_factory=dict)


def find_later(work: Work, parts: int, stage: str, hashed: str, scope: str) -> dict[str, Any]:
    """Note for each part which of its pieces of a scope have stood in an earlier one. hashed: the pass that
    wrote the runs."""
    for stale in (work.folder / stage).glob(f"*.{scope}"):
        stale.unlink()
    count = sum(len(map_npy(path)) for path in work.all_files(hashed, parts, f"{scope}.own.npy"))
    for later in later_ones(work.all_files(hashed, parts, f"{scope}.npy")):
        count += len(later)
        later = later[np.argsort(later["document"], kind="stable")]
        of_part = (later["document"] >> np.uint64(32)).astype(np.int64)
        numbers = np.unique(of_part)
        bounds = zip(np.searchsorted(of_part, numbers), np.searchsorted(of_part, numbers, "right"), strict=True)
        for part, (first, last) in zip(numbers.tolist(), bounds, strict=True):
            with open(work.file(stage, part, scope), "ab") as file:
                file.write(later[first:last].tobytes())
    return {"pieces": count}


def _later(work: Work, part: int, stage: str, hashed: str, scope: str) -> np.ndarray:
    """The rows of a part that have a piece which has stood before, its place, and where it stood."""
    own, path = map_npy(work.file(hashed, part, f"{scope}.own.npy")), work.file(stage, part, scope)
    later = np.concatenate([own, np.fromfile(path, LATER)]) if path.exists() else np.array(own)
    later["document"] &= np.uint64(0xFFFFFFFF)
    return later


def after_exact(work: Work, part: int) -> Iterator[Candidate]:
    """The documents of a part, those that are exact duplicates marked."""
    firsts: dict[int, int] = {}
    if "document" in work.options.exact:
        later = _later(work, part, EXACT, FILTERED, "document")
        firsts = dict(zip(later["document"].tolist(), later["first"].tolist(), strict=True))
    for row, values in enumerate(read_rows(work.file(FILTERED, part, "jsonl.zst"))):
        reason = SAME if row in firsts else None
        yield Candidate(part, row, values, values[work.options.text_key], reason, firsts.get(row))


def after_near(work: Work, part: int) -> Iterator[Candidate]:
    """The documents of a part, all that are duplicates marked."""
    near: dict[int, int] = {}
    if work.options.minhash is not None:
        documents, kept = (map_npy(work.folder / MINHASH / f"{name}.npy") for name in ("dropped", "kept"))
        first = int(np.searchsorted(documents, document_numbers(part, np.zeros(1, np.int64)))[0])
        rows = rows_of_part(documents, part).tolist()
        near = dict(zip(rows, kept[first : first + len(rows)].tolist(), strict=True))
    for one in after_exact(work, part):
        if one.row in near:
            one.reason, one.kept = NEAR, near[one.row]
        yield one


def write_pieces(work: Work, part: int) -> dict[str, Any]:
    """Write the hashes of paragraphs and lines of the documents of a part that are no duplicates: what a
    document repeats that goes must not go too."""
    stay = [(one.row, one.text) for one in after_near(work, part) if one.reason is None]
    for scope in work.options.piece_scopes:
        write_hashes(work, PIECES, part, scope, stay)
    return {}


def after_all(work: Work, part: int) -> Iterator[Candidate]:
    """The documents of a part, duplicates marked, and the texts of others without paragraphs and lines that
    have stood before."""
    places: dict[str, dict[int, list[int]]] = {}
    for scope in work.options.piece_scopes:
        later, places[scope] = _later(work, part, PIECES, PIECES, scope), {}
        for row, place in zip(later["document"].tolist(), later["place"].tolist(), strict=True):
            places[scope].setdefault(row, []).append(place)
    for one in after_near(work, part):
        found = {scope: rows[one.row] for scope, rows in places.items() if one.row in rows}
        if one.reason is None and found:
            left = without_both(one.text, found) if len(found) == 2 else without(one.text, *next(iter(found.items())))
            if left.strip():
                one.removed = {scope: [pieces(one.text, scope)[2 * place] for place in found[scope]] for scope in found}
                one.text = left
            else:
                one.reason = NOTHING_LEFT
        yield one


def write_bands(work: Work, part: int, sign: bool = True) -> dict[str, Any]:
    """Write the keys of the bands of a part. sign: False to write the shingles alone, which `sign_on_device`
    takes on."""
    method = work.options.minhash
    assert method is not None
    rows, keys, held, counted = list[int](), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for batch in _batches(work, part):
        rows += [one.row for one in batch]
        values, counts = hashed_shingles([one.text for one in batch], _hashes(), method.ngrams)
        if sign:
            keys.append(band_keys(signatures(values, counts, method), method))
        else:
            held.append(values)
        counted.append(counts)
    numbers, counts = np.array(rows, np.int64), np.concatenate([np.empty(0, np.int64), *counted])
    if sign:
        _write_bands(work, part, numbers, counts, np.concatenate(keys) if keys else None)
    else:
        np.savez(work.file(MINHASH, part, "shingles.npz"), values=np.concatenate([np.empty(0, np.int32), *held]),
                 counts=counts, rows=numbers)  # fmt: skip
    return {"without": int((counts == 0).sum())}


def sign_on_device(work: Work, part: int, device: str) -> None:
    """Write the keys of the bands of a part whose shingles are written, computed by torch."""
    method = work.options.minhash
    assert method is not None
    path = work.file(MINHASH, part, "shingles.npz")
    with np.load(path) as read:
        values, counts, rows = read["values"], read["counts"], read["rows"]
    keys = band_keys(torch_signatures(values, counts, method, device), method)
    _write_bands(work, part, rows, counts, keys)
    path.unlink()


def _write_bands(work: Work, part: int, rows: np.ndarray, counts: np.ndarray, keys: np.ndarray | None) -> None:
    """Write for each band a run of the first document with each key, and the pairs of the others with it: so
    many copies of one document are few records. With a least Jaccard similarity all are in the runs, for
    which pairs are compared must not depend on the parts."""
    method = work.options.minhash
    assert method is not None
    some, edges = counts > 0, [np.empty((0, 2), np.uint64)]
    documents = document_numbers(part, rows[some])
    for band in range(method.bands):
        of_band = keys[some, band] if keys is not None else np.empty(0, np.uint64)
        order = np.argsort(of_band, kind="stable")
        of_band, numbers = of_band[order], documents[order]
        if method.jaccard is None:
            edges.append(pairs_of(of_band, numbers, False))
            first, _ = groups(of_band)
            of_band, numbers = of_band[first], numbers[first]
        records = np.empty(len(of_band), [("key", "<u8"), ("document", "<u8")])
        records["key"], records["document"] = of_band, numbers
        write_run(work.file(MINHASH, part, f"{band:02d}.npy"), records)
    np.save(work.file(MINHASH, part, "edges.npy"), np.unique(np.concatenate(edges), axis=0))


def find_pairs(work: Work, parts: int, say: Callable[[int], None]) -> np.ndarray:
    """The pairs of documents that share a band [pairs, 2]; without a least Jaccard similarity only as many as
    tell the clusters. say: is told how many bands are done."""
    method = work.options.minhash
    assert method is not None
    held, waiting = np.empty((0, 2), np.uint64), list[np.ndarray]()

    def add(edges: np.ndarray) -> None:
        nonlocal held, waiting
        waiting.append(edges)
        if sum(map(len, waiting)) > _EDGES_HELD:
            held, waiting = _fewer(np.concatenate([held, *waiting]), method), []

    for path in work.all_files(MINHASH, parts, "edges.npy"):
        add(np.array(map_npy(path)))
    for band in range(method.bands):
        for piece in merged(work.all_files(MINHASH, parts, f"{band:02d}.npy")):
            add(pairs_of(piece["key"], piece["document"], method.jaccard is not None))
        say(band + 1)
    return _fewer(np.concatenate([held, *waiting]), method)


def _fewer(edges: np.ndarray, method: MinHash) -> np.ndarray:
    if method.jaccard is not None:
        return np.unique(edges, axis=0)
    nodes, roots = clusters(edges)
    apart = nodes != roots
    return np.stack([roots[apart], nodes[apart]], axis=1)


def write_shingle_sets(work: Work, part: int) -> None:
    """Write the sets of shingles of the documents of a part that are in pairs."""
    method = work.options.minhash
    assert method is not None
    wanted = set(rows_of_part(map_npy(work.folder / MINHASH / "paired.npy"), part).tolist())
    sets = []
    for one in after_exact(work, part) if wanted else ():
        if one.row in wanted:
            values, _ = shingles(*_hashes().of([one.text]), method.ngrams)
            sets.append(np.unique(values))
    np.save(work.file(MINHASH, part, "sets.npy"), np.concatenate([np.empty(0, np.uint64), *sets]))
    sizes = np.array(list(map(len, sets)), np.int64)
    np.savez(work.file(MINHASH, part, "sets.npz"), sizes=sizes)


def similar_pairs(work: Work, pairs: np.ndarray, parts: int) -> np.ndarray:
    """Those pairs whose sets of shingles overlap enough, by their true Jaccard similarity."""
    method = work.options.minhash
    assert method is not None and method.jaccard is not None
    nodes = map_npy(work.folder / MINHASH / "paired.npy")
    files, all_sizes, all_begins = [], [], []
    for part in range(parts):  # documents of pairs are in the order of their numbers, in each part and over all
        with np.load(work.file(MINHASH, part, "sets.npz")) as read:
            all_sizes.append(read["sizes"])
            all_begins.append(np.cumsum(read["sizes"]) - read["sizes"])
        files.append(map_npy(work.file(MINHASH, part, "sets.npy")))
    sizes, begins = np.concatenate(all_sizes), np.concatenate(all_begins)

    def shingle_set(place: int) -> np.ndarray:
        part, begin = int(nodes[place] >> np.uint64(32)), begins[place]
        return files[part][begin : begin + sizes[place]]

    similar = np.zeros(len(pairs), bool)
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        places = np.searchsorted(nodes, pairs[start : start + _PAIRS_AT_ONCE]).tolist()
        for number, (one, other) in enumerate(places, start):
            first, second = shingle_set(one), shingle_set(other)
            shared = len(np.intersect1d(first, second, assume_unique=True))
            similar[number] = shared >= method.jaccard * (len(first) + len(second) - shared)
    return pairs[similar]


def choose(work: Work, pairs: np.ndarray, parts: int) -> dict[str, Any]:
    """Write which documents go and which stay in their place; how many clusters there are, by size."""
    nodes, roots = clusters(pairs)
    method, worth = work.options.minhash, np.zeros(len(nodes))
    assert method is not None
    for part in range(parts) if method.keep != "first" else ():
        rows = rows_of_part(nodes, part)
        first = int(np.searchsorted(nodes, document_numbers(part, np.zeros(1, np.int64)))[0])
        kind = "chars.npy" if method.keep == "longest" else "worth.npy"
        worth[first : first + len(rows)] = map_npy(work.file(FILTERED, part, kind))[rows]
    order = np.lexsort((nodes, -worth, roots))
    begins, heads = groups(roots[order])
    gone, kept = nodes[order][~begins], nodes[order][heads][~begins]
    again = np.argsort(gone)
    np.save(work.folder / MINHASH / "dropped.npy", gone[again])
    np.save(work.folder / MINHASH / "kept.npy", kept[again])
    sizes = np.diff(np.append(np.flatnonzero(begins), len(order)))
    by_size, times = np.unique(sizes, return_counts=True)
    return {"clusters": len(sizes), "sizes": dict(zip(map(str, by_size.tolist()), times.tolist(), strict=True))}


def _batches(work: Work, part: int) -> Iterator[Sequence[Candidate]]:
    batch: list[Candidate] = []
    for one in after_exact(work, part):
        if one.reason is None:
            batch.append(one)
        if len(batch) == _TEXTS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


@lru_cache(1)
def _hashes() -> WordHashes:
    """One a process: its words stay known from part to part."""
    return WordHashes()
