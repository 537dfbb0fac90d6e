"""Finds documents that share an n-gram of words with an evaluation set (Brown et al. 2020, appendix C: 13
words)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.cleaning.shingles import WordHashes, shingles
from megatron.data.errors import DataError
from megatron.data.files import map_npy
from megatron.data.preprocessing.inputs import InputFile

_TEXTS_AT_ONCE = 1000


@dataclass(frozen=True)
class EvaluationRuns:
    """The names and sizes of the evaluation sets whose n-grams `write_runs` wrote.

    names: the names of the sets.
    texts: how many texts they hold together.
    short: how many texts have too few words for an n-gram; documents are not compared with these texts.
    """

    names: tuple[str, ...]
    texts: int
    short: int


def write_runs(files: Sequence[InputFile], ngrams: int, folder: Path) -> EvaluationRuns:
    """Write runs.npy, the sorted hashes of all n-grams of the evaluation sets, and sets.npy, the set index of
    each hash.

    files: the evaluation sets. ngrams: words per n-gram. If several sets hold an n-gram, sets.npy names the
      first set. Raises DataError if no text is long enough for an n-gram.
    """
    hashes, runs_by_batch, sets, texts, short = WordHashes(), [], [], 0, 0
    for number, file in enumerate(files):
        for batch in _texts(file):
            values, counts = shingles(*hashes.hash_words(batch), ngrams)
            texts, short = texts + len(batch), short + int((counts == 0).sum())
            values = np.unique(values)
            runs_by_batch.append(values)
            sets.append(np.full(len(values), number, np.int32))
    if not sum(map(len, runs_by_batch)):
        names = ", ".join(str(file.path) for file in files)
        raise DataError(
            f"--decontaminate: {names}: every text is shorter than {ngrams} words; set a smaller --decontaminate-ngrams"
        )
    runs, first_index = np.unique(np.concatenate(runs_by_batch), return_index=True)
    np.save(folder / "runs.npy", runs)
    np.save(folder / "sets.npy", np.concatenate(sets)[first_index])
    return EvaluationRuns(tuple(_names([file.path for file in files])), texts, short)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: its file name, with as many parent folders as make the names differ."""
    absolute = [path.absolute() for path in paths]
    for depth in range(1, max(len(path.parts) for path in absolute) + 1):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(set(absolute)):
            break
    return names


class Contamination:
    """Finds n-grams of evaluation sets in texts. folder: where `write_runs` wrote the n-grams' hashes."""

    def __init__(self, folder: Path, ngrams: int) -> None:
        self._runs, self._sets, self._ngrams = map_npy(folder / "runs.npy"), map_npy(folder / "sets.npy"), ngrams
        self._hashes = WordHashes()

    def set_of(self, text: str) -> int | None:
        """Return the index of the evaluation set that shares an n-gram with the text; None if no set does.

        If several sets do, the first shared n-gram in the text decides.
        """
        values, _ = shingles(*self._hashes.hash_words([text]), self._ngrams)
        places = np.minimum(np.searchsorted(self._runs, values), len(self._runs) - 1)
        hits = np.flatnonzero(self._runs[places] == values)
        return int(self._sets[places[hits[0]]]) if len(hits) else None


def _texts(file: InputFile) -> Iterator[list[str]]:
    texts = (text for shard in file.shards(None) for row in shard.rows() for text in _strings(row.value()))
    while batch := list(islice(texts, _TEXTS_AT_ONCE)):
        yield batch


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a row's value, however deeply nested in lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
