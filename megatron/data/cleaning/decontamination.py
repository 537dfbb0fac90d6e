"""Documents that hold a run of words of an evaluation set (Brown et al. 2020, appendix C: 13 words)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.cleaning.shingles import WordHashes, shingles
from megatron.data.errors import DataError
from megatron.data.files import map_npy
from megatron.data.preprocessing.inputs import InputFile

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class EvaluationRuns:
    """The runs of all evaluation sets. names: of the sets. short: texts without a whole run, which nothing
    is compared with."""

    names: tuple[str, ...]
    texts: int
    short: int


def write_runs(files: Sequence[InputFile], ngrams: int, folder: Path) -> EvaluationRuns:
    """Write runs.npy, the sorted runs of every text in the rows of the sets, and sets.npy, for each the
    number of the first set that has it. Raises DataError where there is no run at all."""
    hashes, found, sets, texts, short = WordHashes(), [], [], 0, 0
    for number, file in enumerate(files):
        for batch in _texts(file):
            values, counts = shingles(*hashes.of(batch), ngrams)
            texts, short = texts + len(batch), short + int((counts == 0).sum())
            values = np.unique(values)
            found.append(values)
            sets.append(np.full(len(values), number, np.int32))
    if not sum(map(len, found)):
        names = ", ".join(str(file.path) for file in files)
        raise DataError(f"--decontaminate: {names}: no text of {ngrams} words; set a smaller --decontaminate-ngrams")
    runs, first = np.unique(np.concatenate(found), return_index=True)
    np.save(folder / "runs.npy", runs)
    np.save(folder / "sets.npy", np.concatenate(sets)[first])
    return EvaluationRuns(tuple(_names([file.path for file in files])), texts, short)


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of sets: of their files, with as many folders before them as make them differ."""
    absolute = [path.absolute() for path in paths]
    for depth in range(1, max(len(path.parts) for path in absolute) + 1):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(set(absolute)):
            break
    return names


class Contamination:
    """Finds runs of evaluation sets in texts. folder: of `write_runs`."""

    def __init__(self, folder: Path, ngrams: int) -> None:
        self._runs, self._sets, self._ngrams = map_npy(folder / "runs.npy"), map_npy(folder / "sets.npy"), ngrams
        self._hashes = WordHashes()

    def set_of(self, text: str) -> int | None:
        """The number of the set of the text's first run that is in one; None where no run is."""
        values, _ = shingles(*self._hashes.of([text]), self._ngrams)
        places = np.minimum(np.searchsorted(self._runs, values), len(self._runs) - 1)
        hits = np.flatnonzero(self._runs[places] == values)
        return int(self._sets[places[hits[0]]]) if len(hits) else None


def _texts(file: InputFile) -> Iterator[list[str]]:
    batch: list[str] = []
    for shard in file.shards(None):
        for row in shard.rows():
            batch += _strings(row.value())
            if len(batch) >= _ROWS_AT_ONCE:
                yield batch
                batch = []
    if batch:
        yield batch


def _strings(value: Any) -> Iterator[str]:
    """Every text in a row, whatever holds it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
