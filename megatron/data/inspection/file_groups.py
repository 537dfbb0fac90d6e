"""Which dataset files belong together: the text, its labels, its rewards; the chosen and rejected answers of
pairs."""

from dataclasses import dataclass
from pathlib import Path

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import index_path

DOCUMENT = "_document"
PAIR = ("prompt", "chosen", "rejected")
COMPANIONS = ("_label_document", "_reward_document")


@dataclass(frozen=True)
class FileGroup:
    """The prefixes of one text, of its labels and of its rewards. name: which text it is (`text`, `chosen`,
    ...)."""

    name: str
    text: str
    label: str | None = None
    reward: str | None = None


def find_file_groups(prefix: str | Path) -> list[FileGroup]:
    """The file groups of a prefix: of one `.bin/.idx` pair or `.npy` folder, or of all pairs of an
    `--output-prefix`.

    A chosen text comes with the prompt and the rejected one. Raises DataError when there is nothing.
    """
    given = str(prefix).removesuffix(".idx").removesuffix(".bin")
    if index_path(given).is_file() or Path(given).is_dir():
        base, _, name = given.removesuffix(DOCUMENT).rpartition("_")
        paired = [f"{base}_{part}{DOCUMENT}" for part in PAIR] if name in PAIR[1:] else []
        texts = [text for text in paired if index_path(text).is_file()] or [given]
    else:
        folder, stem = Path(given).parent, Path(given).name
        files = sorted(str(file) for file in folder.glob("*.idx") if file.name.startswith(f"{stem}_"))
        prefixes = [file.removesuffix(".idx") for file in files if file.endswith(f"{DOCUMENT}.idx")]
        texts = [file for file in prefixes if not file.endswith(COMPANIONS)]
        if not texts:
            raise DataError(f"{given}.idx: no such file, and no {given}_*_document.idx either; give a data path")
    return [
        FileGroup(
            text.removesuffix(DOCUMENT).rsplit("_", 1)[-1],
            text,
            *(companion_prefix(text, kind) for kind in COMPANIONS),
        )
        for text in texts
    ]


def companion_prefix(text: str, kind: str) -> str | None:
    """The prefix of a text's labels or rewards: `X_label_document` beside `X_document`, or beside
    `X_text_document` as preprocess_data_with_mask.py names it."""
    base = text.removesuffix(DOCUMENT)
    for stem in (base, base.removesuffix("_text")):
        if not text.endswith(COMPANIONS) and index_path(stem + kind).is_file():
            return stem + kind
    return None
