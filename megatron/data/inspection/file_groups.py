"""Groups dataset files that belong together: a text with its labels and rewards, and both sides of
preference pairs."""

from dataclasses import dataclass
from pathlib import Path

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import index_path

DOCUMENT = "_document"
PAIR = ("prompt", "chosen", "rejected")
COMPANIONS = ("_label_document", "_reward_document")


@dataclass(frozen=True)
class FileGroup:
    """The path prefixes of a text's files: `text`, and if they exist its `label` and `reward` files.

    name: the kind of text (`text`, `chosen`, ...).
    """

    name: str
    text: str
    label: str | None = None
    reward: str | None = None


def find_file_groups(prefix: str | Path) -> list[FileGroup]:
    """Return the file groups that belong to `prefix`.

    prefix: one `.bin/.idx` pair, a `.npy` folder, or the `--output-prefix` of several pairs. For a chosen or
      rejected text, the other side and the prompt are returned too. Raises DataError if no file exists.
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
            raise DataError(
                f"{path}.idx: no such file, and no {path}_*_document.idx either; give the path of a dataset without "
                ".bin/.idx"
            )
    names = (text.removesuffix(DOCUMENT).rsplit("_", 1)[-1] for text in texts)
    companions = ((companion_prefix(text, kind) for kind in COMPANIONS) for text in texts)
    return [FileGroup(name, text, *pair) for name, text, pair in zip(names, texts, companions, strict=True)]


def companion_prefix(text: str, kind: str) -> str | None:
    """Return the path prefix of a text's labels or rewards; None if there are none.

    For a text `X_document` (or `X_text_document`, as preprocess_data_with_mask.py names it) it is
    `X_label_document` or `X_reward_document`. kind: one of COMPANIONS.
    """
    base = text.removesuffix(DOCUMENT)
    for stem in (base, base.removesuffix("_text")):
        if not text.endswith(COMPANIONS) and index_path(stem + kind).is_file():
            return stem + kind
    return None
