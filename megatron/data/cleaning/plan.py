"""The options of a job of cleaning, the paths of its files, and how its input is cut into parts."""

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

FORMAT = 1  # of the files of a job
EVALUATION = "evaluation"  # the folder of the runs of evaluation sets
_PARTS, _LEAST, _MOST = 64, 1 << 20, 16 << 20  # how many parts, and how many bytes of input a part may have


@dataclass(frozen=True)
class CleaningOptions:
    """What decides which documents come out, and in which files. text_key: the field of a row that holds its
    text. exact: of `exact.SCOPES`; exact_min_chars: shorter paragraphs and lines are never duplicates.
    validation: the share of documents that goes into files of its own, by a hash of the text and `seed`.
    file_chars: about how many characters of text a file holds. skip_bad_rows: leave out rows that cannot be
    read instead of stopping."""

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
        """The scopes of `exact` that take pieces out of documents: paragraph, line."""
        return tuple(scope for scope in self.exact if scope != "document")

    def describe(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """The folder of a job while it runs. sets: names of evaluation sets."""

    folder: Path
    options: CleaningOptions
    sets: tuple[str, ...] = ()

    def file(self, stage: str, part: int, kind: str) -> Path:
        """A file of a part, as filtered/000012.jsonl.zst."""
        return self.folder / stage / f"{part:06d}.{kind}"

    def all_files(self, stage: str, parts: int, kind: str) -> list[Path]:
        """The paths of a pass's file of one kind, for every part in order."""
        return [self.file(stage, part, kind) for part in range(parts)]


def parts_of(files: Sequence[InputFile]) -> Iterator[tuple[Shard, ...]]:
    """The input in parts, each what a worker does at once and what a crash can cost. They depend on the input
    alone. Of what is compressed the text counts, as far as it is known."""
    total = sum(file.bytes_read for file in files)
    size = min(max(total // _PARTS, _LEAST), _MOST)
    held, bytes_held = list[Shard](), 0
    for file in files:
        for shard in (piece for one in file.shards(None) for piece in _small(one, size)):
            held.append(shard)
            # Records out of a stream are held in memory, a chunk of text in each.
            bytes_held += max(shard.disk_bytes, shards.CHUNK_BYTES) if _is_held(shard) else shard.disk_bytes
            if bytes_held >= size:
                yield tuple(held)
                held, bytes_held = [], 0
    if held:
        yield tuple(held)


def _is_held(shard: Shard) -> bool:
    return isinstance(shard, RecordShard) or isinstance(shard, ShardSlice) and isinstance(shard.shard, RecordShard)


def _small(shard: Shard, size: int) -> list[Shard]:
    """A group of rows of a table in as many slices as its bytes need; whatever else is small already."""
    count = -(-shard.disk_bytes // size)
    if not isinstance(shard, Table) or count < 2:
        return [shard]
    bounds = [shard.length * i // count for i in range(count + 1)]
    return [
        ShardSlice(shard.source, shard.disk_bytes // count, shard, first, last)
        for first, last in pairwise(bounds) if first < last
    ]  # fmt: skip
