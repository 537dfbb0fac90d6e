"""Defines the options of a cleaning job and the paths of its files, and splits its input into parts."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.data.cleaning.minhash import MinHash
from megatron.data.cleaning.recipe import Recipe
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.columnar import Table
from megatron.data.preprocessing.inputs import InputFile, ShardSlice
from megatron.data.preprocessing.shards import RecordShard, Shard

FORMAT = 1  # version of the format of a job's files
EVALUATION = "evaluation"  # the folder with the n-gram hashes of the evaluation sets
_NUM_PARTS = 64
_MIN_PART_BYTES, _MAX_PART_BYTES = 1 << 20, 16 << 20  # bytes of input in one part


@dataclass(frozen=True)
class CleaningOptions:
    """The options that decide which documents are kept, and into which files they go.

    text_key: the field of a row that holds its text.
    exact: where exact duplicates are removed, any of "document", "paragraph" and "line".
    exact_min_chars: shorter paragraphs and lines never count as duplicates.
    validation: the share of documents that go to validation files, chosen by a hash of the text and `seed`.
    file_chars: approximate characters of text in a file.
    keep_rejected: also write the dropped documents.
    skip_bad_rows: skip unreadable rows instead of stopping.
    """

    recipe: Recipe = field(default_factory=Recipe)
    text_key: str = "text"
    exact: tuple[str, ...] = ()
    exact_min_chars: int = 20
    minhash: MinHash | None = None
    validation: float = 0.0
    seed: int = 0
    format: str = "jsonl.zst"
    file_chars: int = 1 << 30
    keep_rejected: bool = False
    skip_bad_rows: bool = False

    @property
    def piece_scopes(self) -> tuple[str, ...]:
        """The scopes in `exact` that are smaller than a document ("paragraph", "line"), whose repeats are
        removed."""
        return tuple(scope for scope in self.exact if scope != "document")

    def describe(self) -> dict[str, Any]:
        """Return all options as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """The work folder of a running cleaning job, and the job's options. sets: names of the evaluation
    sets."""

    folder: Path
    options: CleaningOptions
    sets: tuple[str, ...] = ()

    @property
    def minhash(self) -> MinHash:
        """The settings of near-duplicate detection; only for jobs that have them (`options.minhash` is not
        None)."""
        assert self.options.minhash is not None
        return self.options.minhash

    def file(self, stage: str, part: int, kind: str) -> Path:
        """Return the path of a file that pass `stage` writes for a part, such as
        filtered/000012.jsonl.zst."""
        return self.folder / stage / f"{part:06d}.{kind}"

    def all_files(self, stage: str, parts: int, kind: str) -> list[Path]:
        """Return the paths of the files of one kind that pass `stage` writes, for every part in order."""
        return [self.file(stage, part, kind) for part in range(parts)]


def parts_of(files: Sequence[InputFile]) -> Iterator[tuple[Shard, ...]]:
    """Split the input files into parts, and yield each part as its shards.

    A worker processes one part at a time, and a crash loses at most the parts in progress. Parts depend on
    the input alone. Rows of compressed input are held in memory, so the size of their text limits a part.
    """
    total = sum(file.bytes_read for file in files)
    size = min(max(total // _NUM_PARTS, _MIN_PART_BYTES), _MAX_PART_BYTES)
    held, bytes_held = list[Shard](), 0
    for file in files:
        for shard in (piece for file_shard in file.shards(None) for piece in _small(file_shard, size)):
            held.append(shard)
            # Shards of records from a stream are in memory; each holds a chunk of text.
            bytes_held += max(shard.disk_bytes, shards.CHUNK_BYTES) if _is_held(shard) else shard.disk_bytes
            if bytes_held >= size:
                yield tuple(held)
                held, bytes_held = [], 0
    if held:
        yield tuple(held)


def _is_held(shard: Shard) -> bool:
    return isinstance(shard, RecordShard) or isinstance(shard, ShardSlice) and isinstance(shard.shard, RecordShard)


def _small(shard: Shard, size: int) -> list[Shard]:
    """Split a shard of a table into slices of about `size` bytes; other shards are returned as they are."""
    count = -(-shard.disk_bytes // size)
    if not isinstance(shard, Table) or count < 2:
        return [shard]
    bounds = [shard.length * i // count for i in range(count + 1)]
    return [
        ShardSlice(shard.source, shard.disk_bytes // count, shard, begin, end)
        for begin, end in pairwise(bounds) if begin < end
    ]  # fmt: skip
