"""Groups dataset files that belong together: a text with its labels and rewards, and the sides of pairs."""

from dataclasses import dataclass
from pathlib import Path

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import index_path

DOCUMENT = "_document"
PAIR = ("prompt", "chosen", "rejected")
COMPANIONS = ("_label_document", "_reward_document")


@dataclass(frozen=True)
class FileGroup:
    """The prefixes of the files of one text, of its labels and of its rewards. name: the kind of text
    (`text`, `chosen`, ...)."""

    name: str
    text: str
    label: str | None = None
    reward: str | None = None


def find_file_groups(prefix: str | Path) -> list[FileGroup]:
    """Return the file groups of a prefix, which names one `.bin/.idx` pair or `.npy` folder, or is the
    `--output-prefix` of several pairs.

    For a chosen or rejected text, the other side and the prompt are returned too. Raises DataError if no file
    exists.
    """
    path = str(prefix).removesuffix(".idx").removesuffix(".bin")
    if index_path(path).is_file() or Path(path).is_dir():
        base, _, name = path.removesuffix(DOCUMENT).rpartition("_")
        paired = [f"{base}_{part}{DOCUMENT}" for part in PAIR] if name in PAIR[1:] else []
        texts = [text for text in paired if index_path(text).is_file()] or [path]
    else:
        folder, stem = Path(path).parent, Path(path).name
        files = sorted(str(file) for file in folder.glob("*.idx") if file.name.startswith(f"{stem}_"))
        prefixes = [file.removesuffix(".idx") for file in files if file.endswith(f"{DOCUMENT}.idx")]
        texts = [file for file in prefixes if not file.endswith(COMPANIONS)]
        if not texts:
            raise DataError(f"{path}.idx: no such file, and no {path}_*_document.idx either; give a data path")
    names = (text.removesuffix(DOCUMENT).rsplit("_", 1)[-1] for text in texts)
    companions = ((companion_prefix(text, kind) for kind in COMPANIONS) for text in texts)
    return [FileGroup(name, text, *pair) for name, text, pair in zip(names, texts, companions, strict=True)]


def companion_prefix(text: str, kind: str) -> str | None:
    """Return the prefix of a text's labels or rewards: `X_label_document` for `X_document`, or for
    `X_text_document` as preprocess_data_with_mask.py names it. None if there is none. kind: of COMPANIONS."""
    base = text.removesuffix(DOCUMENT)
    for stem in (base, base.removesuffix("_text")):
        if not text.endswith(COMPANIONS) and index_path(stem + kind).is_file():
            return stem + kind
    return None
