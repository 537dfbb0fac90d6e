"""Opens labels (`X_label_document`) and rewards (`X_reward_document`), and checks them against the tokens.

Labels are int32, one for each token, not shifted: the token itself, or -100 where it is not trained. Rewards
  are one number for each document.
"""

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset, data_path, index_path
from megatron.data.open_dataset import open_dataset

MASKED = -100
CHUNK = 1 << 24  # labels processed at once


def open_labels(prefix: str, text: IndexedDataset) -> IndexedDataset:
    """Open the labels of the tokens of `text`.

    Raises DataError, naming the first wrong document, unless there is one integer label for each token.
    """
    labels = open_dataset(prefix)
    if labels.dtype.kind != "i":
        raise DataError(
            f"{labels.data_file}: holds {labels.dtype}, but labels must be signed integers, such as int32 (-100 where "
            "masked); make the labels again"
        )
    _check_documents(labels, text, "labels")
    differ = np.flatnonzero(labels.sizes != text.sizes)
    if len(differ):
        document = int(differ[0])
        raise DataError(
            f"{labels.data_file}: document {document} has {labels.sizes[document]} labels, but {text.data_file} has "
            f"{text.sizes[document]} tokens of it ({len(differ)} such documents); make both again in one "
            "preprocessing run"
        )
    return labels


def open_rewards(prefix: str, text: IndexedDataset) -> IndexedDataset:
    """Open the rewards of the documents of `text`. Raises DataError if a document has no finite reward."""
    rewards = IndexedDataset(prefix)
    _check_documents(rewards, text, "rewards")
    present = np.flatnonzero(rewards.sizes)
    finite = np.zeros(len(rewards), bool)
    finite[present] = np.isfinite(rewards.tokens[rewards.pointers[present] // rewards.dtype.itemsize])
    bad = np.flatnonzero(~finite)
    if len(bad):
        raise DataError(
            f"{rewards.data_file}: document {bad[0]} has no finite reward ({len(bad)} such documents); make the "
            "rewards again"
        )
    return rewards


def _check_documents(companion: IndexedDataset, text: IndexedDataset, kind: str) -> None:
    if len(companion) != len(text):
        raise DataError(
            f"{companion.data_file}: {kind} of {len(companion)} documents, but {text.data_file} has {len(text)}: "
            f"document {min(len(companion), len(text))} is only in one of them; make both again in one preprocessing "
            "run"
        )


def has_label(labels: IndexedDataset, start: int, stop: int, begin: int, end: int) -> np.ndarray:
    """Return a boolean [stop - start]: whether each document of [start, stop) has an unmasked label at
    tokens [begin, end)."""
    return first_labelled_token(labels, begin, start, stop) < np.minimum(labels.sizes[start:stop], end)


def first_labelled_token(labels: IndexedDataset, begin: int = 1, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Return, for each document of [start, stop), the index of its first token with an unmasked label, int64.

    Tokens before index `begin` do not count. If there is no such token, the result is the document's length.
    stop: None for all documents.
    """
    sizes = labels.sizes[start:stop].astype(np.int64)
    ends, tokens = np.cumsum(sizes), sizes.copy()
    begins, done = ends - sizes, 0
    while done < len(sizes):
        count = max(1, int(np.searchsorted(ends, begins[done] + CHUNK, side="right")) - done)
        block = slice(done, done + count)
        places = begins[done] + np.flatnonzero(labels.span(start + done, start + done + count) >= 0)
        labelled_place = np.append(places, ends[-1])[np.searchsorted(places, begins[block] + begin)]
        tokens[block] = np.minimum(labelled_place, ends[block]) - begins[block]
        done += count
    return tokens


def unlisted_labels(prefix: str, key: str) -> str | None:
    """Return a log line if a label file exists for data path `prefix` that the configuration does not list,
    else None.

    key: the configuration key that should list it.
    """
    stem = prefix.removesuffix("_document")
    for label_prefix in (f"{stem}_label_document", f"{stem.rpartition('_')[0]}_label_document"):
        if stem != prefix and index_path(label_prefix).is_file() and data_path(label_prefix).is_file():
            try:
                tokens = IndexedDataset(label_prefix).tokens
            except DataError as problem:
                return f"{prefix}: all tokens are trained; a label file next to it cannot be read ({problem})"
            masked = sum(int((tokens[start : start + CHUNK] < 0).sum()) for start in range(0, len(tokens), CHUNK))
            share = 100 * masked / max(1, len(tokens))
            return (
                f"{prefix}: all tokens are trained; a label file next to it would mask {masked} of {len(tokens)} "
                f"({share:.1f} %): to use it, list {label_prefix} in {key}"
            )
    return None
