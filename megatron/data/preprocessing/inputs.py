"""The files behind what `--input` names: files, globs, folders, datasets of the HuggingFace hub or cloned
from it."""

import glob
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.errors import DataError
from megatron.data.preprocessing import columnar
from megatron.data.preprocessing.compression import COMPRESSED
from megatron.data.preprocessing.readers import SUFFIXES, file_kind, file_shards
from megatron.data.preprocessing.shards import InputRow, Shard
from megatron.data.preprocessing.splits import WHOLE, requested_splits, split_of, split_rows
from megatron.neox_arguments.errors import disk_problem, lfs_pointer_error
from megatron.neox_arguments.optional_packages import import_optional

HUB = "hf://"
# Kinds whose rows are here what they are in `datasets`; it copies all others into its cache, as Arrow
READ_IN_PLACE = ("parquet", "arrow", "lines", "json")
_ENDINGS = tuple(f"{suffix}{packing}" for suffix in SUFFIXES for packing in ("", *COMPRESSED))
_FRONT_MATTER = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---", re.DOTALL)


class RowRange(NamedTuple):
    """Rows [first, last) of a file that has `total`."""

    first: int
    last: int
    total: int


@dataclass(frozen=True)
class InputFile:
    """One file that is read, and what tells it from another version of itself. rows: None for all."""

    path: Path
    size: int
    modified: int
    rows: RowRange | None = None

    @classmethod
    def of(cls, path: Path, rows: RowRange | None = None) -> "InputFile":
        state = path.stat()
        return cls(path, state.st_size, state.st_mtime_ns, rows)

    @property
    def bytes_read(self) -> int:
        """About how many bytes of the file are read."""
        return self.size if self.rows is None else self.size * (self.rows.last - self.rows.first) // self.rows.total

    def version(self) -> list[Any]:
        """What tells the file from another version of itself, as JSON values."""
        return [str(self.path), self.size, self.modified, self.rows]

    def shards(self, columns: Sequence[str] | None) -> Iterator[Shard]:
        """The shards of the file. columns: those that are needed of a table; None for all."""
        whole = _shards(self.path, columns)
        return whole if self.rows is None else _cut(whole, self.rows)


@dataclass(frozen=True)
class ShardSlice(Shard):
    """Rows [first, last) of a shard."""

    shard: Shard
    first: int
    last: int

    def rows(self) -> Iterator[InputRow]:
        return itertools.islice(self.shard.rows(), self.first, self.last)


def _shards(path: Path, columns: Sequence[str] | None) -> Iterator[Shard]:
    match file_kind(path)[0]:
        case "parquet":
            return columnar.parquet_shards(path, columns)
        case "arrow":
            return columnar.arrow_shards(path, columns)
        case _:
            return file_shards(path)


def _cut(shards: Iterator[Shard], rows: RowRange) -> Iterator[Shard]:
    before = 0
    for shard in shards:
        if before >= rows.last:
            return
        count = shard.count()
        first, last = max(rows.first - before, 0), min(rows.last - before, count)
        if first < last:
            yield ShardSlice(shard.source, shard.disk_bytes * (last - first) // count, shard, first, last)
        before += count


_ABOUT = ("dataset_infos.json", "dataset_info.json", "metadata.json")  # what the hub's older datasets say of themselves


def listed(text: str) -> list[str]:
    """The names in a list with commas; a comma within the name of a file that is there separates nothing."""
    names: list[str] = []
    parts = text.split(",")
    while parts:
        ends = [end for end in range(len(parts), 1, -1) if Path(",".join(parts[:end])).exists()]
        end = ends[0] if ends else 1
        names.append(",".join(parts[:end]))
        parts = parts[end:]
    return names


def resolve(
    inputs: Sequence[str | Path], split: str | None = None, subset: str | None = None, **hub: Any
) -> list[InputFile]:
    """The files behind paths, globs, folders and names on the hub.

    split: in the words of `datasets` (see `splits.requested_splits`); None: the only one there is. subset:
    the configuration of a dataset that has several. hub: further arguments of `datasets.load_dataset`.
    Raises DataError for what cannot be read, and where there is a choice that is not made.
    """
    files: list[InputFile] = []
    for item in map(str, inputs):
        path = Path(item)
        if item.startswith(HUB) or not path.exists() and _looks_like_hub(item):
            files += _from_hub(item.removeprefix(HUB), split, subset, hub)
        elif path.is_dir():
            files += _folder(path, split, subset, hub)
        else:
            matches = [path] if path.is_file() else sorted(map(Path, glob.glob(item, recursive=True)))
            paths = [match for match in matches if match.is_file()]
            if not paths:
                raise DataError(f"{path}: no such file")
            files += _named(paths, split, subset, item)
    return files


def _looks_like_hub(name: str) -> bool:
    """Whether a name is `organisation/name`, and no folder of the name `organisation` lies here."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).parent.exists()


def _folder(folder: Path, split: str | None, subset: str | None, hub: dict[str, Any]) -> list[InputFile]:
    if (folder / "dataset_dict.json").is_file():
        _without_subsets(folder, subset)
        names = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return _chosen(names, split, folder, lambda name: _saved(folder / name))
    if (folder / "state.json").is_file():
        _without_subsets(folder, subset)
        name = re.split(r"\W", json.loads((folder / "state.json").read_text()).get("_split") or WHOLE)[0]
        return _chosen([name], split, folder, lambda name: _saved(folder))
    readable = (path for path in folder.iterdir() if path.is_file() and path.name.endswith(_ENDINGS))
    paths = sorted(path for path in readable if path.name not in _ABOUT)
    shards = (path for path in (folder / "data").glob("*") if path.name.endswith(_ENDINGS))
    as_on_the_hub = _has_configurations(folder) or any(split_of(path, folder) is not None for path in shards)
    if as_on_the_hub or not paths and any(path.is_dir() for path in folder.iterdir()):
        return _repository(folder, split, subset, hub)
    if not paths:
        raise DataError(f"{folder}: neither a dataset folder nor a folder with {', '.join(SUFFIXES)} files")
    return _named(paths, split, subset, folder)


def _saved(folder: Path) -> list[Path]:
    """The files of one split that `save_to_disk` wrote. Raises DataError where an index file chooses rows."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder}: rows are chosen by an index file; call flatten_indices() and save it again")
    return [folder / part["filename"] for part in state["_data_files"]]


def _without_subsets(where: object, subset: str | None) -> None:
    if subset is not None:
        raise DataError(f"{where}: --subset {subset}: only datasets with a README.md that lists subsets have any")


def _named(files: Sequence[Path], split: str | None, subset: str | None, where: object) -> list[InputFile]:
    """Files of one folder or glob, whose names may tell splits; these are merged only where that is asked
    for."""
    _without_subsets(where, subset)
    for path in files:
        file_kind(path)  # raises for one that is not read
    by_split: dict[str, list[Path]] = {}
    base = Path(os.path.commonpath([path.parent for path in files]))
    for path in files:
        name = split_of(path, base)
        if name is not None:
            by_split.setdefault(name, []).append(path)
    if split is None and len(by_split) < 2:
        by_split = {}  # one split, with files beside it that are of none: all that is there
    by_split = by_split or {WHOLE: list(files)}
    return _chosen(by_split, split, where, by_split.__getitem__)


def _has_configurations(folder: Path) -> bool:
    """Whether the front matter of README.md says which files make which split."""
    readme = folder / "README.md"
    front = _FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
    return front is not None and re.search(r"^configs:", front[1], re.MULTILINE) is not None


def _repository(folder: Path, split: str | None, subset: str | None, hub: dict[str, Any]) -> list[InputFile]:
    """The files of a folder as on the hub: `datasets` says which subsets and splits there are, and their
    files."""
    datasets = _datasets(folder)
    try:
        subsets = datasets.get_dataset_config_names(str(folder))
        if subset not in subsets and (subset is not None or len(subsets) > 1):
            wrong = "holds several subsets" if subset is None else f"no subset {subset}; there are"
            raise DataError(f"{folder}: {wrong} ({', '.join(subsets)}); choose one with --subset")
        subset = subset or subsets[0]
        about = {name: value for name, value in hub.items() if name != "num_proc"}
        config = datasets.load_dataset_builder(str(folder), subset, **about).config
        by_split = {str(name): [Path(file) for file in files] for name, files in (config.data_files or {}).items()}
        in_place = _plain(config) and all(_in_place(file) for files in by_split.values() for file in files)
        if not _has_configurations(folder):
            _log_left_out(folder, {file for files in by_split.values() for file in files})
        files_of = by_split.__getitem__ if in_place else partial(_converted, str(folder), subset, hub=hub)
        return _chosen(by_split, split, folder, files_of)
    except DataError:
        raise
    except Exception as problem:  # each mistake in a front matter or a file has its own kind of exception
        raise DataError(f"{folder}: no dataset that the datasets package can read ({_reason(problem)})") from None


def _log_left_out(folder: Path, read: Collection[Path]) -> None:
    """Log one line where data lies beside the splits, in files whose names tell of no split."""
    beside = (path for place in (folder, folder / "data") for path in place.glob("*") if path.name.endswith(_ENDINGS))
    resolved = {path.resolve() for path in read}
    left = sorted(path.name for path in beside if path.name not in _ABOUT and path.resolve() not in resolved)
    if left:
        logging.getLogger("megatron").warning(
            f"{folder}: {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}: of no split by name, so not read, as "
            "in the datasets package; give such a file by itself"
        )


def _plain(config: Any) -> bool:
    """Whether a configuration sets nothing about how files are read (a separator, names of columns, ...)."""
    about = {"name", "version", "data_dir", "data_files", "description"}
    default = type(config)()
    return all(
        getattr(config, field.name) == getattr(default, field.name)
        for field in fields(config) if field.name not in about
    )  # fmt: skip


def _in_place(path: Path) -> bool:
    try:
        return path.is_file() and file_kind(path)[0] in READ_IN_PLACE
    except DataError:
        return False


def _from_hub(name: str, split: str | None, subset: str | None, hub: dict[str, Any]) -> list[InputFile]:
    datasets = _datasets(name)
    try:
        names = None if split not in (None, "all") else datasets.get_dataset_split_names(name, subset)
        return _chosen(names, split, name, partial(_converted, name, subset, hub=hub))
    except DataError:
        raise
    except Exception as problem:  # offline, unknown, private, needs a script: each has its own kind of exception
        if (disk := disk_problem(problem)) is not None:
            raise DataError(f"{name}: the cache of HuggingFace cannot be written ({disk}); set HF_HOME") from None
        raise DataError(
            f"{name}: no such file here, and https://huggingface.co/datasets/{name} cannot be had "
            f"({_reason(problem)}). Offline, fetch it where there is a network and give the folder"
        ) from None


def _converted(name: str, subset: str | None, split: str, hub: dict[str, Any]) -> list[Path]:
    """The Arrow files into which `datasets` turns a whole split."""
    loaded = _datasets(name).load_dataset(name, subset, split=split, **hub)
    return [Path(part["filename"]) for part in loaded.cache_files]


def _datasets(name: str | Path) -> Any:
    what = "reading a folder as on" if isinstance(name, Path) else "no such file; reading"
    return import_optional("datasets", DataError(f"{name}: {what} the HuggingFace hub needs the datasets package"))


def _reason(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0] or type(problem).__name__


def _chosen(
    names: Collection[str] | None, split: str | None, where: object, files_of: Callable[[str], Sequence[Path]]
) -> list[InputFile]:
    """The files, or rows of files, of the splits that are asked for. names: of all splits; None where only
    `files_of` knows them. where: what messages name."""
    chosen = []
    for name, part in requested_splits(split, names, where):
        files = [_file(path) for path in files_of(name)]
        if part == name:
            chosen += files
            continue
        counts = [sum(shard.count() for shard in file.shards(None)) for file in files]
        first, last = split_rows(part, name, sum(counts))
        for file, count, end in zip(files, counts, itertools.accumulate(counts), strict=True):
            begin = end - count
            if max(first, begin) < min(last, end):
                rows = RowRange(max(first, begin) - begin, min(last, end) - begin, count)
                chosen.append(InputFile.of(file.path, rows))
    if not chosen:
        raise DataError(f"{where}: --split {split} has no rows")
    return chosen


def _file(path: Path) -> InputFile:
    if (pointer := lfs_pointer_error(path)) is not None:
        raise DataError(pointer)
    return InputFile.of(path)
