"""Finds the files that `--input` names: files, globs, folders, and datasets on the HuggingFace hub or cloned
from it.

It also finds the splits (train, validation, test, ...) that `--split` requests. The syntax and names of
splits are those of HuggingFace's `datasets`: `train`, `train+test`, `train[:10%]`, `train[-100:]`, `all`.
"""

import glob
import itertools
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
from megatron.neox_arguments.errors import disk_problem, lfs_pointer_error
from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.values.json_text import parse_json

HUB = "hf://"
# Kinds whose rows are the same here as in `datasets`; other kinds are read from its cache, as Arrow
READ_IN_PLACE = ("parquet", "arrow", "lines", "json")
_ENDINGS = tuple(f"{suffix}{packing}" for suffix in SUFFIXES for packing in ("", *COMPRESSED))
_FRONT_MATTER = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---", re.DOTALL)
# JSON files that describe older datasets of the hub and hold no rows
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "metadata.json")
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
DEFAULT_SPLIT = "train"  # the split of data whose names tell no split
_SHARDED = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")  # under data/ of a repository: a file of a split of any name


class RowRange(NamedTuple):
    """The rows [start, stop) of a file that has `total` rows."""

    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class InputFile:
    """An input file; its size and modification time identify its version. rows: the rows to read; None:
    all."""

    path: Path
    size: int
    modified: int
    rows: RowRange | None = None

    @classmethod
    def from_path(cls, path: Path, rows: RowRange | None = None) -> "InputFile":
        state = path.stat()
        return cls(path, state.st_size, state.st_mtime_ns, rows)

    @property
    def bytes_read(self) -> int:
        """The approximate number of bytes of the file that are read."""
        return self.size if self.rows is None else self.size * (self.rows.stop - self.rows.start) // self.rows.total

    def version(self) -> list[Any]:
        """Return JSON values that identify this version of the file."""
        return [str(self.path), self.size, self.modified, self.rows]

    def shards(self, columns: Sequence[str] | None) -> Iterator[Shard]:
        """Return the shards of the file. columns: the columns of a table to read; None: all."""
        tables = {"parquet": columnar.parquet_shards, "arrow": columnar.arrow_shards}
        read_table = tables.get(file_kind(self.path)[0])
        all_shards = file_shards(self.path) if read_table is None else read_table(self.path, columns)
        return all_shards if self.rows is None else _slice_shards(all_shards, self.rows)


@dataclass(frozen=True)
class ShardSlice(Shard):
    """The rows [start, stop) of another shard."""

    shard: Shard
    start: int
    stop: int

    def rows(self) -> Iterator[InputRow]:
        return itertools.islice(self.shard.rows(), self.start, self.stop)


def _slice_shards(shards: Iterator[Shard], rows: RowRange) -> Iterator[Shard]:
    offset = 0
    for shard in shards:
        if offset >= rows.stop:
            return
        count = shard.count()
        start, stop = max(rows.start - offset, 0), min(rows.stop - offset, count)
        if start < stop:
            yield ShardSlice(shard.source, shard.disk_bytes * (stop - start) // count, shard, start, stop)
        offset += count


def split_names(text: str) -> list[str]:
    """Split a list of file names at commas; a comma within the name of an existing file does not split."""
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
    """Return the input files for paths, globs, folders and names of datasets on the HuggingFace hub.

    split: in the syntax of `datasets` (see `requested_splits`); None: the only split. subset: the
      configuration of a dataset that has several. hub: further arguments of `datasets.load_dataset`. Raises
      DataError for unreadable input, and if a split or subset must be chosen.
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
                raise DataError(f"{path}: no such file, and no file matches it as a glob")
            files += _files_by_split(paths, split, subset, item)
    return files


def _looks_like_hub(name: str) -> bool:
    """Return whether `name` has the form `organisation/name`, and no folder `organisation` exists here."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).parent.exists()


def _folder(folder: Path, split: str | None, subset: str | None, hub: dict[str, Any]) -> list[InputFile]:
    if (folder / "dataset_dict.json").is_file():
        _without_subsets(folder, subset)
        names = _description(folder / "dataset_dict.json", "splits", str)["splits"]
        return _chosen(names, split, folder, lambda name: _saved(folder / name))
    if (folder / "state.json").is_file():
        _without_subsets(folder, subset)
        split_name = _description(folder / "state.json", "_data_files", dict).get("_split")
        name = re.split(r"\W", split_name if isinstance(split_name, str) and split_name else DEFAULT_SPLIT)[0]
        return _chosen([name], split, folder, lambda name: _saved(folder))
    paths, shards = sorted(_data_files(folder)), _data_files(folder / "data")
    as_on_the_hub = _has_configurations(folder) or any(split_of(path, folder) is not None for path in shards)
    if as_on_the_hub or not paths and any(path.is_dir() for path in folder.iterdir()):
        return _repository(folder, split, subset, hub)
    if not paths:
        raise DataError(f"{folder}: neither a dataset folder nor a folder with {', '.join(SUFFIXES)} files")
    return _files_by_split(paths, split, subset, folder)


def _data_files(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("*") if path.is_file() and path.name not in _DESCRIPTIONS]
    return [path for path in files if path.name.endswith(_ENDINGS)]


def _saved(folder: Path) -> list[Path]:
    """Return the files of one split in a folder that `save_to_disk` of `datasets` wrote.

    Raises DataError if the split is a selection of rows by an index file.
    """
    state = _description(folder / "state.json", "_data_files", dict)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder}: rows are selected by an indices file; call flatten_indices() and save it again")
    return [folder / str(part.get("filename")) for part in state["_data_files"]]


def _description(file: Path, name: str, kind: type) -> dict[str, Any]:
    """Return the content of a JSON file that `save_to_disk` of `datasets` wrote.

    Raises DataError unless it is an object in which `name` is a list of values of the type `kind`.
    """
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        if all(isinstance(item, kind) for item in content[name]) and isinstance(content[name], list):
            return content
        problem: object = f"{name} is not a list of {kind.__name__}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as cause:
        problem = cause if isinstance(cause, OSError | ValueError) else f"there is no list {name}"
    raise DataError(f"{file}: damaged, or not written by save_to_disk of datasets ({problem}); save the dataset again")


def _without_subsets(label: object, subset: str | None) -> None:
    if subset is not None:
        raise DataError(
            f"{label}: --subset {subset}: this input has no subsets (no README.md lists any); leave --subset out"
        )


def _files_by_split(files: Sequence[Path], split: str | None, subset: str | None, label: object) -> list[InputFile]:
    """Return those files of a folder or glob that belong to the requested split.

    If `split` is None, all files are returned; DataError is raised if their names tell several splits.
    """
    _without_subsets(label, subset)
    for path in files:
        file_kind(path)  # raises for an unsupported kind
    split_files: dict[str, list[Path]] = {}
    base = Path(os.path.commonpath([path.parent for path in files]))
    for path in files:
        name = split_of(path, base)
        if name is not None:
            split_files.setdefault(name, []).append(path)
    if split is None and len(split_files) < 2:
        split_files = {}  # one split, and perhaps files of no split: all files are read
    split_files = split_files or {DEFAULT_SPLIT: list(files)}
    return _chosen(split_files, split, label, split_files.__getitem__)


def _has_configurations(folder: Path) -> bool:
    """Return whether the README.md of a folder lists configurations (`configs:`), as on the HuggingFace
    hub."""
    readme = folder / "README.md"
    front = _FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
    return front is not None and re.search(r"^configs:", front[1], re.MULTILINE) is not None


def _repository(folder: Path, split: str | None, subset: str | None, hub: dict[str, Any]) -> list[InputFile]:
    """Return the files of a folder laid out as on the HuggingFace hub.

    The `datasets` package finds its subsets, splits and files.
    """
    datasets = _datasets(folder)
    try:
        subsets = datasets.get_dataset_config_names(str(folder))
        if subset not in subsets and (subset is not None or len(subsets) > 1):
            wrong = "holds several subsets" if subset is None else f"no subset {subset}; there are"
            raise DataError(f"{folder}: {wrong} ({', '.join(subsets)}); choose one with --subset")
        subset = subset or subsets[0]
        builder_args = {name: value for name, value in hub.items() if name != "num_proc"}
        config = datasets.load_dataset_builder(str(folder), subset, **builder_args).config
        split_files = {str(name): [Path(file) for file in files] for name, files in (config.data_files or {}).items()}
        in_place = _has_default_options(config) and all(
            _in_place(file) for files in split_files.values() for file in files
        )
        if not _has_configurations(folder):
            _log_left_out(folder, {file for files in split_files.values() for file in files})
        files_of = split_files.__getitem__ if in_place else partial(_converted, str(folder), subset, hub=hub)
        return _chosen(split_files, split, folder, files_of)
    except DataError:
        raise
    except Exception as problem:  # errors in README.md or a file have many kinds of exceptions
        raise DataError(f"{folder}: the datasets package cannot read it ({_reason(problem)})") from None


def _log_left_out(folder: Path, read: Collection[Path]) -> None:
    """Log one line if a folder holds data files that are not read because their names tell no split."""
    resolved = {path.resolve() for path in read}
    candidates = [*_data_files(folder), *_data_files(folder / "data")]
    left = sorted(path.name for path in candidates if path.resolve() not in resolved)
    if left:
        logging.getLogger("megatron").warning(
            f"{folder}: {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}: their names tell no split, so "
            "they are not read (as in the datasets package); to read such a file, name it as input"
        )


def _has_default_options(config: Any) -> bool:
    """Return whether a dataset's configuration leaves all reading options (separator, column names, ...)
    at their defaults."""
    descriptive = {"name", "version", "data_dir", "data_files", "description"}
    default = type(config)()
    return all(
        getattr(config, field.name) == getattr(default, field.name)
        for field in fields(config) if field.name not in descriptive
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
    except Exception as problem:  # offline, unknown, private, with a script: many kinds of exceptions
        if (disk := disk_problem(problem)) is not None:
            raise DataError(f"{name}: the cache of HuggingFace cannot be written ({disk}); set HF_HOME") from None
        raise DataError(
            f"{name}: no such file here, and https://huggingface.co/datasets/{name} cannot be fetched "
            f"({_reason(problem)}). Offline, fetch it on a machine with a network, copy it here and give its folder"
        ) from None


def _converted(name: str, subset: str | None, split: str, hub: dict[str, Any]) -> list[Path]:
    """Return the Arrow files into which `datasets` converts a split."""
    loaded = _datasets(name).load_dataset(name, subset, split=split, **hub)
    return [Path(part["filename"]) for part in loaded.cache_files]


def _datasets(name: str | Path) -> Any:
    activity = "reading a folder laid out as on" if isinstance(name, Path) else "no such file; reading it from"
    return import_optional(
        "datasets",
        DataError(f"{name}: {activity} the HuggingFace hub needs the datasets package (pip install datasets)"),
    )


def _reason(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0] or type(problem).__name__


def split_of(path: Path, base: Path) -> str | None:
    """Return the split that the names of a file and of its folders below `base` tell; None if they tell none.

    Names are read as in `datasets`: `train-00000-of-00002.parquet`, `my_test.csv`, `validation/part.jsonl`.
    """
    for name in path.relative_to(base).parts:
        for split, words in KEYWORDS.items():
            if re.search(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)", name):
                return split
    sharded = _SHARDED.match(path.name)
    in_repository = path.parent.name == "data" and (path.absolute().parent.parent / "README.md").is_file()
    return sharded[1] if sharded and in_repository else None


def requested_splits(split: str | None, names: Collection[str] | None, label: object) -> list[tuple[str, str]]:
    """Return (name of a split, requested part of it) for each split that `split` names.

    The part may be a slice of the split's rows, such as `train[:10%]`.
    split: in the syntax of `--split`; None: the only split.
    names: the names of the splits that exist; None: any name is allowed.
    Raises DataError if `split` is None but there are several splits, or if a requested split does not exist.
    """
    present = ", ".join(names or ())
    if split is None and names is not None and len(names) > 1:
        raise DataError(
            f"{label}: holds several splits ({present}); choose one with --split, or several as "
            f"--split {'+'.join(list(names)[:2])}"
        )
    take_all = names is not None and (split is None or split == "all" and "all" not in names)
    parts = list(names or ()) if take_all else re.split(r"\s*\+\s*", str(split).strip())
    chosen = [(re.split(r"[\[(]", part)[0].strip(), part) for part in parts]
    for name, _ in chosen:
        if names is not None and name not in names:
            raise DataError(f"{label}: no split {name}; there are {present} (--split)")
    return chosen


def split_rows(part: str, name: str, rows: int) -> tuple[int, int]:
    """Return [first, last) of the rows that a part of `--split` such as `train[:10%]` requests, rounded as in
    `datasets`.

    name, rows: the split's name and number of rows.
    """
    missing = DataError(f"--split {part}: needs the datasets package (pip install datasets)")
    datasets = import_optional("datasets", missing)
    try:
        (instruction,) = datasets.ReadInstruction.from_spec(part).to_absolute({name: rows})
    except (ValueError, AssertionError) as problem:
        raise DataError(f"--split {part}: {str(problem).splitlines()[0]} ({name} has {rows} rows)") from None
    return instruction.from_, instruction.to


def _chosen(
    names: Collection[str] | None, split: str | None, label: object, files_of: Callable[[str], Sequence[Path]]
) -> list[InputFile]:
    """Return the files, or rows of files, of the requested splits.

    names: the names of all splits; None if only `files_of` knows them. files_of: returns the files of a
      split. label: the name of the input in messages.
    """
    chosen = []
    for name, part in requested_splits(split, names, label):
        files = [_file(path) for path in files_of(name)]
        if part == name:
            chosen += files
            continue
        counts = [sum(shard.count() for shard in file.shards(None)) for file in files]
        start, stop = split_rows(part, name, sum(counts))
        for file, count, end in zip(files, counts, itertools.accumulate(counts), strict=True):
            begin = end - count
            if max(start, begin) < min(stop, end):
                rows = RowRange(max(start, begin) - begin, min(stop, end) - begin, count)
                chosen.append(InputFile.from_path(file.path, rows))
    if not chosen:
        raise DataError(f"{label}: --split {split} has no rows; choose another split or slice")
    return chosen


def _file(path: Path) -> InputFile:
    try:
        pointer = lfs_pointer_error(path)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); make or copy it again") from None
    if pointer is not None:
        raise DataError(pointer)
    return InputFile.from_path(path)
