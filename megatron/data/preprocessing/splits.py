"""Splits of a dataset (train, validation, test, ...): which files are of which, and what `--split` asks for.

Words and names are those of HuggingFace's `datasets`: `train`, `train+test`, `train[:10%]`, `train[-100:]`,
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
WHOLE = "train"  # what data without names of splits is called
_SHARDED = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")  # under data/ of a repository, a split of any name


def split_of(path: Path, base: Path) -> str | None:
    """The split that the names of a file and of the folders below `base` tell, as `datasets` reads them:
    `train-00000-of-00002.parquet`, `my_test.csv`, `validation/part.jsonl`."""
    for name in path.relative_to(base).parts:
        for split, words in KEYWORDS.items():
            if re.search(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)", name):
                return split
    sharded = _SHARDED.match(path.name)
    of_repository = path.parent.name == "data" and (path.absolute().parent.parent / "README.md").is_file()
    return sharded[1] if sharded and of_repository else None


def requested_splits(split: str | None, names: Collection[str] | None, where: object) -> list[tuple[str, str]]:
    """The splits that `split` asks for among `names`: each as (name, its part of `split`, which may cut rows
    out).

    None asks for the only one; `names` None takes any. Raises DataError where there are several, or not the
    one.
    """
    present = ", ".join(names or ())
    if split is None and names is not None and len(names) > 1:
        raise DataError(
            f"{where}: holds several splits ({present}); choose one with --split, or several as "
            f"--split {'+'.join(list(names)[:2])}"
        )
    whole = names is not None and (split is None or split == "all" and "all" not in names)
    parts = list(names or ()) if whole else re.split(r"\s*\+\s*", str(split).strip())
    chosen = [(re.split(r"[\[(]", part)[0].strip(), part) for part in parts]
    for name, _ in chosen:
        if names is not None and name not in names:
            raise DataError(f"{where}: no split {name}; there are {present} (--split)")
    return chosen


def split_rows(part: str, name: str, rows: int) -> tuple[int, int]:
    """[first, last) of the rows of a split that a part of `--split` asks for, `train[:10%]`, rounded as
    `datasets`."""
    if part == name:
        return 0, rows
    missing = DataError(f"--split {part}: needs the datasets package (pip install datasets)")
    datasets = import_optional("datasets", missing)
    try:
        (wanted,) = datasets.ReadInstruction.from_spec(part).to_absolute({name: rows})
    except (ValueError, AssertionError) as problem:
        raise DataError(f"--split {part}: {str(problem).splitlines()[0]} ({name} has {rows} rows)") from None
    return wanted.from_, wanted.to
