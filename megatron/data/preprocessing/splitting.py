"""Splits datasets into training, validation and test parts, document by document.

Labels, rewards, the other side of pairs and a reference model's log-probabilities are split in the same way.
Each part is a folder in which the files keep their names, so that companion files are still found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import sync, temporary, write_json
from megatron.data.indexed_dataset import CODES, IndexedDataset, data_path, index_path, publish, write_index
from megatron.data.inspection.file_groups import find_file_groups
from megatron.neox_arguments.values.json_text import parse_json

CHUNK = 1 << 24  # tokens copied between two reports of progress


@dataclass(frozen=True)
class WrittenPart:
    """A dataset that was written for one part: its path prefix, documents and tokens."""

    prefix: str
    documents: int
    tokens: int


def assign(documents: int, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """Assign documents to parts at random; return {part: its documents in ascending order}.

    Each part in `shares` gets its share, and `train` gets the remaining documents. A share below 1 is a
    fraction of all documents, rounded; from 1 on it is a number of documents. The same seed and shares give
    the same parts. Raises DataError if a part would be empty.
    """
    counts = {}
    for name, share in shares.items():
        if not (0 < share < 1 or (share >= 1 and share == int(share))):
            raise DataError(f"--{name} {share:g}: expected a share between 0 and 1, or a number of documents")
        counts[name] = round(share * documents) if share < 1 else int(share)
        if not counts[name]:
            raise DataError(
                f"--{name} {share:g} of {documents} documents rounds to none; give a larger share, or a number of "
                "documents"
            )
    if sum(counts.values()) >= documents:
        counts_text = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(f"{counts_text}: none of {documents} documents is left for training; use smaller parts")
    shuffled = np.random.RandomState(seed).permutation(documents)
    ends = np.cumsum(list(counts.values()))
    *parts, train = np.split(shuffled, ends)
    return {"train": np.sort(train), **{name: np.sort(part) for name, part in zip(counts, parts, strict=True)}}


def files_of(prefixes: Sequence[str]) -> dict[str, list[str]]:
    """Return {path prefix of a text: prefixes of all datasets that belong to its documents}.

    These are the text itself, its labels, its rewards and so on. Raises DataError for a prefix without files.
    """
    files: dict[str, list[str]] = {}
    for prefix in prefixes:
        for group in find_file_groups(prefix):
            companions = [path for path in (group.label, group.reward) if path is not None]
            text = Path(group.text)
            references = sorted(
                str(file).removesuffix(".idx")
                for file in text.parent.glob("*.idx")
                if file.name.startswith(f"{text.name}_")
            )
            files[group.text] = [group.text, *companions, *references]
    return files


def split(
    prefixes: Sequence[str],
    folder: str | Path,
    shares: Mapping[str, float],
    seed: int,
    *,
    overwrite: bool = False,
    progress: Callable[[str, float], None] = lambda name, share: None,
) -> list[WrittenPart]:
    """Split the texts of `prefixes` and their companions (see `files_of`) into FOLDER/train, FOLDER/valid,
    ....

    All texts are split by the same documents. The files appear when all are written. shares: see `assign`.
    progress: called with a file's name and the share of it that is copied. Raises DataError for texts with
    different numbers of documents, companions that do not fit, and files that already exist unless
    `overwrite`. Memory: some 50 bytes per document.
    """
    files = files_of(prefixes)
    sets = {path: IndexedDataset(path) for paths in files.values() for path in paths}
    boundaries = _boundaries(files, sets)
    parts = assign(len(boundaries) - 1, shares, seed)
    targets = {(name, path): str(Path(folder) / name / Path(path).name) for name in parts for path in sets}
    if len(set(targets.values())) < len(targets):
        raise DataError(
            f"{', '.join(sets)}: two files have the same name, but each part is a single folder; rename one"
        )
    for (_, path), target in targets.items():
        if not overwrite and (index_path(target).exists() or data_path(target).exists()):
            raise DataError(f"{target}.bin, .idx: exist already; add --overwrite to replace them")
        if Path(target).resolve() == Path(path).resolve():
            raise DataError(f"{target}: would overwrite the input; give another --output-dir")
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
    """Return the document boundaries of all texts, counted in sequences. Raises DataError if the texts
    differ."""
    first_text, *_ = files
    boundaries = sets[first_text].doc_idx
    for text, companions in files.items():
        text_boundaries = sets[text].doc_idx
        if not np.array_equal(text_boundaries, boundaries):
            raise DataError(
                f"{text}: {len(text_boundaries) - 1} documents in {len(sets[text])} sequences, but {first_text} has "
                f"{len(boundaries) - 1} in {len(sets[first_text])}: they do not belong together; split each by itself"
            )
        for path in companions:
            if len(sets[path]) != len(sets[text]):
                raise DataError(
                    f"{path}: {len(sets[path])} sequences, but {text}, to which it belongs by its name, has "
                    f"{len(sets[text])}; make both again in one preprocessing run, or move this file to another folder"
                )
            if sets[path].dtype.newbyteorder("=") not in CODES:
                raise DataError(f"{path}: its type {sets[path].dtype} cannot be written; make it again as float32")
    return boundaries


def _write(
    source: IndexedDataset,
    boundaries: np.ndarray,
    documents: np.ndarray,
    data: Path,
    index: Path,
    progress: Callable[[float], None],
) -> int:
    """Copy some documents of `source` to the files `data` and `index`, and sync them; return the token count.

    boundaries: the document boundaries of the source, in sequences. documents: which documents are copied,
      ascending. progress: called with the share that is copied.
    """
    counts = np.diff(boundaries)[documents]
    # Consecutive documents of the source are copied at once, as a run
    breaks = np.flatnonzero(np.diff(documents) != 1) + 1
    firsts, lasts = np.append(0, breaks), np.append(breaks, len(documents))
    sizes, tokens, reported_tokens = [], 0, 0
    with open(data, "wb") as file:
        for run_start, run_end in zip(firsts.tolist(), lasts.tolist(), strict=True):
            begin, end = int(boundaries[documents[run_start]]), int(boundaries[documents[run_end - 1] + 1])
            sizes.append(np.asarray(source.sizes[begin:end]))
            copied = source.span(begin, end)
            for start in range(0, len(copied), CHUNK):
                file.write(copied[start : start + CHUNK].tobytes())
            tokens += len(copied)
            if tokens - reported_tokens >= CHUNK:
                reported_tokens = tokens
                progress(run_end / len(documents))
    sync(data)
    lengths, ends = np.concatenate(sizes), np.cumsum(counts)
    write_index(index, source.dtype.newbyteorder("="), lambda: [(lengths, ends)])
    progress(1.0)
    return tokens


def _describe(text: str, folder: Path, parts: Mapping[str, np.ndarray], choice: Mapping[str, Any]) -> None:
    """Copy a text's `_metadata.json`, if it has one, into the folder of every part, with facts about the
    split added."""
    name, metadata_file = Path(text).name.removesuffix("_document"), None
    while metadata_file is None and name:
        candidate = Path(text).with_name(f"{name}_metadata.json")
        metadata_file = candidate if candidate.is_file() else None
        name = name.rpartition("_")[0]
    if metadata_file is None:
        return
    try:
        facts = parse_json(metadata_file.read_text())
    except ValueError as problem:
        raise DataError(f"{metadata_file}: not JSON ({problem}); move this file away, or make the data again") from None
    for part, documents in parts.items():
        split_facts = {"of": text, "part": part, "documents": len(documents), **choice}
        write_json(folder / part / metadata_file.name, {**facts, "split": split_facts})
