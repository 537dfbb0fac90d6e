"""Finds duplicates among all documents of a job: first exact duplicates, then near-duplicates among the
others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from megatron.data.cleaning.exact import (
    REPEAT,
    pieces,
    remove_paragraphs_and_lines,
    remove_pieces,
    repeats_across_parts,
)
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
NEAR_DUPLICATE, EXACT_DUPLICATE, NOTHING_LEFT = "minhash/near_duplicate", "exact/document", "exact/nothing_left"
_TEXTS_AT_ONCE = 400
_EDGES_HELD = 4_000_000
_PAIRS_AT_ONCE = 100_000


@dataclass
class Candidate:
    """A document, and what the passes so far have decided about it.

    reason: why it is dropped; None if it is kept. duplicate_of: for a dropped duplicate, the number of the
      document that is kept instead. removed: {"paragraph" or "line": the pieces removed from its text}.
    """

    part: int
    row: int
    values: dict[str, Any]
    text: str
    reason: str | None = None
    duplicate_of: int | None = None
    removed: Mapping[str, Sequence[str]] = field(default_factory=dict)


def find_repeats(work: Work, parts: int, stage: str, hashed: str, scope: str) -> dict[str, Any]:
    """Find the pieces of each part that already occur in an earlier part, and write one file per part with
    them.

    stage: the pass whose folder the files go to. hashed: the pass that wrote the hashes. scope: the size of a
      piece, "document", "paragraph" or "line".
    Returns {"pieces": number of repeated pieces, including repeats within one part}.
    """
    for stale in (work.folder / stage).glob(f"*.{scope}"):
        stale.unlink()
    count = sum(len(map_npy(path)) for path in work.all_files(hashed, parts, f"{scope}.own.npy"))
    for repeats in repeats_across_parts(work.all_files(hashed, parts, f"{scope}.npy")):
        count += len(repeats)
        repeats = repeats[np.argsort(repeats["document"], kind="stable")]
        part_numbers = (repeats["document"] >> np.uint64(32)).astype(np.int64)
        numbers, first_index = np.unique(part_numbers, return_index=True)
        for part, records in zip(numbers.tolist(), np.split(repeats, first_index[1:]), strict=False):
            with open(work.file(stage, part, scope), "ab") as file:
                file.write(records.tobytes())
    return {"pieces": count}


def _repeats_of_part(work: Work, part: int, stage: str, hashed: str, scope: str) -> np.ndarray:
    """Return the repeated pieces of a part as REPEAT records, whose field `document` holds the row number in
    the part."""
    own_repeats, path = map_npy(work.file(hashed, part, f"{scope}.own.npy")), work.file(stage, part, scope)
    repeats = np.concatenate([own_repeats, np.fromfile(path, REPEAT)]) if path.exists() else np.array(own_repeats)
    repeats["document"] &= np.uint64(0xFFFFFFFF)
    return repeats


def after_exact(work: Work, part: int) -> Iterator[Candidate]:
    """Yield every document of a part, with `reason` and `duplicate_of` set for exact duplicates."""
    originals: dict[int, int] = {}
    if "document" in work.options.exact:
        repeats = _repeats_of_part(work, part, EXACT, FILTERED, "document")
        originals = dict(zip(repeats["document"].tolist(), repeats["first"].tolist(), strict=True))
    for row, values in enumerate(read_rows(work.file(FILTERED, part, "jsonl.zst"))):
        reason = EXACT_DUPLICATE if row in originals else None
        yield Candidate(part, row, values, values[work.options.text_key], reason, originals.get(row))


def after_near(work: Work, part: int) -> Iterator[Candidate]:
    """Yield every document of a part, with `reason` and `duplicate_of` set for exact and near-duplicates."""
    duplicates: dict[int, int] = {}
    if work.options.minhash is not None:
        documents, retained = (map_npy(work.folder / MINHASH / f"{name}.npy") for name in ("dropped", "kept"))
        begin = int(np.searchsorted(documents, document_numbers(part, np.zeros(1, np.int64)))[0])
        rows = rows_of_part(documents, part).tolist()
        duplicates = dict(zip(rows, retained[begin : begin + len(rows)].tolist(), strict=True))
    for candidate in after_exact(work, part):
        if candidate.row in duplicates:
            candidate.reason, candidate.duplicate_of = NEAR_DUPLICATE, duplicates[candidate.row]
        yield candidate


def write_pieces(work: Work, part: int) -> dict[str, Any]:
    """Write hashes of all paragraphs and lines of a part's documents, except of documents that are
    duplicates.

    Hashing a dropped duplicate too would make the kept document's own paragraphs count as repeats.
    """
    stay = [(candidate.row, candidate.text) for candidate in after_near(work, part) if candidate.reason is None]
    for scope in work.options.piece_scopes:
        write_hashes(work, PIECES, part, scope, stay)
    return {}


def after_all(work: Work, part: int) -> Iterator[Candidate]:
    """Yield every document of a part, with duplicates marked and repeated paragraphs and lines removed."""
    places: dict[str, dict[int, list[int]]] = {}
    for scope in work.options.piece_scopes:
        repeats, places[scope] = _repeats_of_part(work, part, PIECES, PIECES, scope), {}
        for row, place in zip(repeats["document"].tolist(), repeats["place"].tolist(), strict=True):
            places[scope].setdefault(row, []).append(place)
    for candidate in after_near(work, part):
        repeated_places = {scope: rows[candidate.row] for scope, rows in places.items() if candidate.row in rows}
        if candidate.reason is None and repeated_places:
            remaining = (
                remove_paragraphs_and_lines(candidate.text, repeated_places)
                if len(repeated_places) == 2
                else remove_pieces(candidate.text, *next(iter(repeated_places.items())))
            )
            if remaining.strip():
                candidate.removed = {
                    scope: [pieces(candidate.text, scope)[2 * place] for place in repeated_places[scope]]
                    for scope in repeated_places
                }
                candidate.text = remaining
            else:
                candidate.reason = NOTHING_LEFT
        yield candidate


def write_bands(work: Work, part: int, sign: bool = True) -> dict[str, Any]:
    """Write the MinHash band keys of a part's documents; with sign=False only their shingles, for
    `sign_on_device`.

    Returns {"without": number of documents too short for a shingle}.
    """
    method = work.minhash
    rows, keys = list[int](), [np.empty((0, method.bands), np.uint64)]
    values_by_batch, counts_by_batch = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    candidates = (candidate for candidate in after_exact(work, part) if candidate.reason is None)
    while batch := list(islice(candidates, _TEXTS_AT_ONCE)):
        rows += [candidate.row for candidate in batch]
        values, counts = hashed_shingles([candidate.text for candidate in batch], _hashes(), method.ngrams)
        if sign:
            keys.append(band_keys(signatures(values, counts, method), method))
        else:
            values_by_batch.append(values)
        counts_by_batch.append(counts)
    numbers, counts = np.array(rows, np.int64), np.concatenate(counts_by_batch)
    if sign:
        _write_bands(work, part, numbers, counts, np.concatenate(keys))
    else:
        values = np.concatenate(values_by_batch)
        np.savez(work.file(MINHASH, part, "shingles.npz"), values=values, counts=counts, rows=numbers)
    return {"without": int((counts == 0).sum())}


def sign_on_device(work: Work, part: int, device: str) -> None:
    """Compute a part's band keys with torch on `device`, from the shingles that `write_bands` wrote.

    The band keys are written and the shingles deleted.
    """
    method = work.minhash
    path = work.file(MINHASH, part, "shingles.npz")
    with np.load(path) as read:
        values, counts, rows = read["values"], read["counts"], read["rows"]
    keys = band_keys(torch_signatures(values, counts, method, device), method)
    _write_bands(work, part, rows, counts, keys)
    path.unlink()


def _write_bands(work: Work, part: int, rows: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> None:
    """Write one sorted file per MinHash band, with each band key of the part and the first document that has
    it.

    Edges from this first document to the key's other documents go to edges.npy, so many copies need few
    records. With `jaccard` the files hold all documents and there are no edges, because the compared pairs
    must not depend on how the input is split into parts.
    rows: the row number of each document in the part. counts: how many shingles each document has. keys: the
      band keys of each document.
    """
    method = work.minhash
    has_shingles, edges = counts > 0, [np.empty((0, 2), np.uint64)]
    documents = document_numbers(part, rows[has_shingles])
    for band in range(method.bands):
        keys_of_band = keys[has_shingles, band]
        order = np.argsort(keys_of_band, kind="stable")
        keys_of_band, numbers = keys_of_band[order], documents[order]
        if method.jaccard is None:
            edges.append(pairs_of(keys_of_band, numbers, False))
            begins, _ = groups(keys_of_band)
            keys_of_band, numbers = keys_of_band[begins], numbers[begins]
        records = np.empty(len(keys_of_band), [("key", "<u8"), ("document", "<u8")])
        records["key"], records["document"] = keys_of_band, numbers
        write_run(work.file(MINHASH, part, f"{band:02d}.npy"), records)
    np.save(work.file(MINHASH, part, "edges.npy"), np.unique(np.concatenate(edges), axis=0))


def find_pairs(work: Work, parts: int, report: Callable[[int], None]) -> np.ndarray:
    """Return the pairs of documents that share a MinHash band, [pairs, 2].

    With `jaccard` None, it returns only as many pairs as are needed to connect each cluster.
    report: called with the number of bands done.
    """
    method = work.minhash
    held, waiting = np.empty((0, 2), np.uint64), list[np.ndarray]()

    def add(edges: np.ndarray) -> None:
        nonlocal held, waiting
        waiting.append(edges)
        if sum(map(len, waiting)) > _EDGES_HELD:
            held, waiting = _reduce_edges(np.concatenate([held, *waiting]), method), []

    for path in work.all_files(MINHASH, parts, "edges.npy"):
        add(np.array(map_npy(path)))
    for band in range(method.bands):
        for piece in merged(work.all_files(MINHASH, parts, f"{band:02d}.npy")):
            add(pairs_of(piece["key"], piece["document"], method.jaccard is not None))
        report(band + 1)
    return _reduce_edges(np.concatenate([held, *waiting]), method)


def _reduce_edges(edges: np.ndarray, method: MinHash) -> np.ndarray:
    if method.jaccard is not None:
        return np.unique(edges, axis=0)
    nodes, roots = clusters(edges)
    is_member = nodes != roots
    return np.stack([roots[is_member], nodes[is_member]], axis=1)


def write_shingle_sets(work: Work, part: int) -> None:
    """Write the set of shingles of each document of a part that is listed in paired.npy (documents in a
    pair)."""
    method = work.minhash
    paired_rows = set(rows_of_part(map_npy(work.folder / MINHASH / "paired.npy"), part).tolist())
    sets = []
    for candidate in after_exact(work, part) if paired_rows else ():
        if candidate.row in paired_rows:
            values, _ = shingles(*_hashes().hash_words([candidate.text]), method.ngrams)
            sets.append(np.unique(values))
    np.save(work.file(MINHASH, part, "sets.npy"), np.concatenate([np.empty(0, np.uint64), *sets]))
    sizes = np.array(list(map(len, sets)), np.int64)
    np.savez(work.file(MINHASH, part, "sets.npz"), sizes=sizes)


def similar_pairs(work: Work, pairs: np.ndarray, parts: int) -> np.ndarray:
    """Return the pairs of documents whose shingle sets have at least the Jaccard similarity `jaccard`."""
    method = work.minhash
    assert method.jaccard is not None
    nodes = map_npy(work.folder / MINHASH / "paired.npy")
    files, all_sizes, all_begins = [], [], []
    for part in range(parts):  # documents in pairs are sorted by their numbers, within a part and over all parts
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
        for number, (left_place, right_place) in enumerate(places, start):
            left, right = shingle_set(left_place), shingle_set(right_place)
            shared = len(np.intersect1d(left, right, assume_unique=True))
            similar[number] = shared >= method.jaccard * (len(left) + len(right) - shared)
    return pairs[similar]


def choose(work: Work, pairs: np.ndarray, parts: int) -> dict[str, Any]:
    """Choose which document of each cluster is kept, and write dropped.npy and kept.npy.

    dropped.npy lists all other documents of the clusters; kept.npy names, for each of them, the kept
    document.
    pairs: the near-duplicate pairs. parts: number of parts of the input. Returns {"clusters": number of
      clusters, "sizes": {size: number of clusters of that size}}.
    """
    nodes, roots = clusters(pairs)
    method, worth = work.minhash, np.zeros(len(nodes))
    for part in range(parts) if method.keep != "first" else ():
        rows = rows_of_part(nodes, part)
        begin = int(np.searchsorted(nodes, document_numbers(part, np.zeros(1, np.int64)))[0])
        kind = "chars.npy" if method.keep == "longest" else "worth.npy"
        worth[begin : begin + len(rows)] = map_npy(work.file(FILTERED, part, kind))[rows]
    order = np.lexsort((nodes, -worth, roots))
    begins, heads = groups(roots[order])
    dropped, retained = nodes[order][~begins], nodes[order][heads][~begins]
    document_order = np.argsort(dropped)
    np.save(work.folder / MINHASH / "dropped.npy", dropped[document_order])
    np.save(work.folder / MINHASH / "kept.npy", retained[document_order])
    sizes = np.diff(np.append(np.flatnonzero(begins), len(order)))
    cluster_sizes, times = np.unique(sizes, return_counts=True)
    return {"clusters": len(sizes), "sizes": dict(zip(map(str, cluster_sizes.tolist()), times.tolist(), strict=True))}


@lru_cache(1)
def _hashes() -> WordHashes:
    """Return the `WordHashes` of this process, created once for all parts."""
    return WordHashes()
