"""Resolves splits of a dataset (train, validation, test, ...): the split of each file, and those that
`--split` requests.

Syntax and names are those of HuggingFace's `datasets`: `train`, `train+test`, `train[:10%]`, `train[-100:]`,
`all`.
"""

import re
from collections.abc import Collection
from pathlib import Path

from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
DEFAULT_SPLIT = "train"  # what data without names of splits is called
_SHARDED = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")  # under data/ of a repository, a split of any name


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

    A part, such as `train[:10%]`, may be a slice of the split's rows.
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
    """Return [first, last) of the rows that a part of `--split` requests, as `train[:10%]`, rounded as in
    `datasets`."""
    if part == name:
        return 0, rows
    missing = DataError(f"--split {part}: needs the datasets package (pip install datasets)")
    datasets = import_optional("datasets", missing)
    try:
        (instruction,) = datasets.ReadInstruction.from_spec(part).to_absolute({name: rows})
    except (ValueError, AssertionError) as problem:
        raise DataError(f"--split {part}: {str(problem).splitlines()[0]} ({name} has {rows} rows)") from None
    return instruction.from_, instruction.to
