"""Cutting data into training, validation and test parts, document by document: labels, rewards, the other
side of pairs and a reference model's log-probabilities follow their documents.

Each part is a folder in which the files keep their names, so that what belongs together is found as before.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import sync, temporary
from megatron.data.indexed_dataset import CODES, IndexedDataset, data_path, index_path, publish, write_index
from megatron.data.inspection.file_groups import find_file_groups

CHUNK = 1 << 24  # tokens copied between two reports of progress


@dataclass(frozen=True)
class WrittenPart:
    """One file pair of one part."""

    prefix: str
    documents: int
    tokens: int


def assign(documents: int, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """The documents of each part, their numbers rising: those of `shares`, drawn at random, and `train`, the
    rest.

    A share below 1 is of all documents, rounded; from 1 on it is a number of them. The same seed and shares
    give the same parts. Raises DataError where a part would be empty.
    """
    counts = {}
    for name, share in shares.items():
        if not (0 < share < 1 or (share >= 1 and share == int(share))):
            raise DataError(f"--{name} {share:g}: expected a share between 0 and 1, or a number of documents")
        counts[name] = round(share * documents) if share < 1 else int(share)
        if not counts[name]:
            raise DataError(f"--{name} {share:g} of {documents} documents is none; give a number of documents")
    if sum(counts.values()) >= documents:
        asked = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(f"nothing is left for training of {documents} documents ({asked})")
    drawn = np.random.RandomState(seed).permutation(documents)
    ends = np.cumsum(list(counts.values()))
    *others, train = np.split(drawn, ends)
    return {"train": np.sort(train), **{name: np.sort(part) for name, part in zip(counts, others, strict=True)}}


def files_of(prefixes: Sequence[str]) -> dict[str, list[str]]:
    """Prefix of each text -> all file pairs that hold something for each of its documents, itself first.

    Raises DataError for a prefix without files.
    """
    found: dict[str, list[str]] = {}
    for prefix in prefixes:
        for group in find_file_groups(prefix):
            beside = [path for path in (group.label, group.reward) if path is not None]
            text = Path(group.text)
            references = sorted(
                str(file).removesuffix(".idx")
                for file in text.parent.glob("*.idx")
                if file.name.startswith(f"{text.name}_")
            )
            found[group.text] = [group.text, *beside, *references]
    return found


def split(
    prefixes: Sequence[str],
    folder: str | Path,
    shares: Mapping[str, float],
    seed: int,
    *,
    overwrite: bool = False,
    progress: Callable[[str, float], None] = lambda name, share: None,
) -> list[WrittenPart]:
    """Cut the texts of `prefixes` (see `files_of`) alike into FOLDER/train, FOLDER/valid, ...; the files
    appear when all are written.

    shares: see `assign`. progress: called with a file's name and the share of it that is copied. Raises
    DataError for texts of different numbers of documents, companions that do not fit, and files that exist
    already unless `overwrite`. Memory: some 50 bytes a document.
    """
    files = files_of(prefixes)
    sets = {path: IndexedDataset(path) for paths in files.values() for path in paths}
    boundaries = _boundaries(files, sets)
    parts = assign(len(boundaries) - 1, shares, seed)
    targets = {(name, path): str(Path(folder) / name / Path(path).name) for name in parts for path in sets}
    if len(set(targets.values())) < len(targets):
        raise DataError(f"{', '.join(sets)}: two have one name, but all parts are written to one folder; rename one")
    for target in targets.values():
        if not overwrite and (index_path(target).exists() or data_path(target).exists()):
            raise DataError(f"{target}.bin, .idx: exist already; --overwrite replaces them")
    for target, path in ((target, path) for (_, path), target in targets.items()):
        if Path(target).resolve() == Path(path).resolve():
            raise DataError(f"{target}: would replace what is split; give another --output-dir")
    written, unfinished = [], {target: (temporary(data_path(target)), temporary(index_path(target)))
                               for target in targets.values()}  # fmt: skip
    try:
        for (name, path), target in targets.items():
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            tokens = _write(sets[path], boundaries, parts[name], *unfinished[target], partial(progress, target))
            written.append(WrittenPart(target, len(parts[name]), tokens))
        for target, (data, index) in unfinished.items():
            publish(data, index, target)
        for text in files:
            _describe(text, Path(folder), parts, {**shares, "seed": seed})
    except OSError as problem:
        raise DataError(f"{folder}: cannot be written ({problem.strerror or problem})") from None
    finally:
        for pair in unfinished.values():
            for file in pair:
                file.unlink(missing_ok=True)
    return written


def _boundaries(files: Mapping[str, Sequence[str]], sets: Mapping[str, IndexedDataset]) -> np.ndarray:
    """The document boundaries that all texts have, in sequences."""
    first, *_ = files
    boundaries = sets[first].doc_idx
    for text, beside in files.items():
        here = sets[text].doc_idx
        if not np.array_equal(here, boundaries):
            counts = f"{len(here) - 1} documents in {len(sets[text])} sequences, {first} {len(boundaries) - 1} in "
            raise DataError(f"{text}: {counts}{len(sets[first])}: they do not belong together; name one data path")
        for path in beside:
            if len(sets[path]) != len(sets[text]):
                raise DataError(
                    f"{path}: {len(sets[path])} sequences, but {text}, whose name it begins with or shares, has "
                    f"{len(sets[text])}; make both again in one go, or take it away from beside the text"
                )
            if sets[path].dtype.newbyteorder("=") not in CODES:
                raise DataError(f"{path}: {sets[path].dtype} cannot be written; make it again as float32")
    return boundaries


def _write(
    source: IndexedDataset,
    boundaries: np.ndarray,
    documents: np.ndarray,
    data: Path,
    index: Path,
    progress: Callable[[float], None],
) -> int:
    """Write the two files of some documents, numbers rising, and sync them; returns the number of tokens."""
    counts = np.diff(boundaries)[documents]
    # Neighbours are copied in one go: a run ends where the next document is not the next one of the source
    breaks = np.flatnonzero(np.diff(documents) != 1) + 1
    firsts, lasts = np.append(0, breaks), np.append(breaks, len(documents))
    total, done, told = len(documents), 0, 0
    sizes, tokens = [], 0
    with open(data, "wb") as file:
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            begin, end = int(boundaries[documents[first]]), int(boundaries[documents[last - 1] + 1])
            sizes.append(np.asarray(source.sizes[begin:end]))
            for block in _blocks(source.span(begin, end)):
                file.write(block.tobytes())
                tokens += len(block)
            done = last
            if tokens - told >= CHUNK:
                told = tokens
                progress(done / total)
        file.flush()
        os.fsync(file.fileno())
    lengths, ends = np.concatenate(sizes), np.cumsum(counts)
    write_index(index, source.dtype.newbyteorder("="), lambda: [(lengths, ends)])
    progress(1.0)
    return tokens


def _blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    return (tokens[at : at + CHUNK] for at in range(0, len(tokens), CHUNK))


def _describe(text: str, folder: Path, parts: Mapping[str, np.ndarray], choice: Mapping[str, Any]) -> None:
    """Write the text's `_metadata.json`, where it has one, into every part, with how it was split."""
    name, beside = Path(text).name.removesuffix("_document"), None
    while beside is None and name:
        candidate = Path(text).with_name(f"{name}_metadata.json")
        beside = candidate if candidate.is_file() else None
        name = name.rpartition("_")[0]
    if beside is None:
        return
    try:
        facts = json.loads(beside.read_text())
    except ValueError as problem:
        raise DataError(f"{beside}: not JSON ({problem}); take it away, or make the data again") from None
    for part, documents in parts.items():
        target = folder / part / beside.name
        unfinished = temporary(target)
        about = {"of": text, "part": part, "documents": len(documents), **choice}
        unfinished.write_text(json.dumps({**facts, "split": about}, indent=1) + "\n")
        sync(unfinished)
        os.replace(unfinished, target)
