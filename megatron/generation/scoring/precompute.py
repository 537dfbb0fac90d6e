"""Implements `text_gen_type: precompute`: writes a dataset's log-probabilities under a model beside the
dataset.

Preference training reads them as GPT-NeoX's precomputed reference log-probabilities
(`precompute_model_name`).
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from megatron.checkpointing import replace_file
from megatron.data import DataError, IndexedDataset
from megatron.data.files import sync
from megatron.data.indexed_dataset import DocumentBlock, index_path, publish, write_index
from megatron.data.open_dataset import open_tokens
from megatron.distributed import on_rank_zero
from megatron.generation.batching.memory_budget import forward_budget
from megatron.generation.model import Model
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, rolling_windows, score_texts
from megatron.generation.scoring.partial_file import job_fingerprint, partial_file
from megatron.neox_arguments import NeoXArgs
from megatron.process.progress import ProgressBar

_TOKENS_AT_ONCE = 1 << 18  # tokens per data-parallel rank between two writes; an interruption loses at most these
_VALUE = np.dtype("<f4")


def data_paths(args: NeoXArgs) -> list[str]:
    """Returns the paths of all datasets that the configuration names, without duplicates."""
    lists = [
        [args.data_path] if args.data_path else None,
        args.train_data_paths, args.valid_data_paths, args.test_data_paths,
        args.pos_train_data_paths, args.neg_train_data_paths, args.pos_valid_data_paths, args.neg_valid_data_paths,
        args.pos_test_data_paths, args.neg_test_data_paths,
    ]  # fmt: skip
    return list(dict.fromkeys(path for paths in lists for path in paths or ()))


def precompute(model: Model, logger: logging.Logger) -> None:
    """Writes the log-probability of every token of each dataset PATH to `PATH_NAME.bin` and `PATH_NAME.idx`.

    NAME is `precompute_model_name`. Each token gets a float32: its log-probability given the tokens before it
    in its document. The first token of a document gets 0. Documents longer than the model's positions are
    scored in windows.

    All ranks call this function together. A later call continues an interrupted one. Finished files are kept;
    raises DataError if they were made from another model or other data.
    """
    for path in data_paths(model.args):
        _precompute_one(model, path, logger)


def _precompute_one(model: Model, path: str, logger: logging.Logger) -> None:
    args, groups = model.args, model.groups
    final = Path(f"{path}_{args.precompute_model_name}")
    dataset = on_rank_zero(groups, lambda: open_tokens(path, args.data_impl))
    files = [file for file in (dataset.index_file, *dataset.data_files) if file.is_file()]
    fingerprint = on_rank_zero(groups, lambda: job_fingerprint(args, model.folders, files))
    if on_rank_zero(groups, lambda: _is_complete(final, fingerprint)):
        logger.info(f"{final}: already exists, so it is not computed again")
        return
    ends = np.concatenate([[0], np.cumsum(dataset.sizes, dtype=np.int64)])
    total = int(ends[-1])
    growing, done = on_rank_zero(groups, lambda: _open_partial(ends, final, fingerprint))
    if done:
        logger.info(f"{final}: an interrupted run is continued, going on after {done} of {len(dataset)} documents")
    share = _TOKENS_AT_ONCE * groups.size("data")
    budget = forward_budget(model, None if args.eval_batch_size == "auto" else args.eval_batch_size)
    with ProgressBar(
        final.name, total, "token", logger, done=int(ends[done]), visible=groups.world_rank == 0
    ) as progress:
        while done < len(dataset):
            last = max(done + 1, int(np.searchsorted(ends, ends[done] + share, side="right")) - 1)
            texts = [dataset[i].astype(np.int64).tolist() for i in range(done, last)]
            _check_tokens(texts, model, path)
            windows = [_windows(tokens, model.positions) for tokens in texts]
            report = partial(progress.advance_to_share, int(ends[done]), int(ends[last] - ends[done]))
            scored = score_texts(model, windows, overlong="refuse", budget=budget, on_progress=report)
            on_rank_zero(groups, partial(_append, growing, texts, scored))
            done = last
            progress.advance_to(int(ends[done]))
    on_rank_zero(groups, lambda: _finish(growing, final, dataset, fingerprint))
    logger.info(f"{final}: holds the log-probabilities of {len(dataset)} documents, {total} tokens")


def _check_tokens(texts: Sequence[list[int]], model: Model, path: str) -> None:
    vocabulary = model.columns or model.args.padded_vocab_size
    highest = max((max(tokens) for tokens in texts if tokens), default=0)
    if highest >= vocabulary:
        raise DataError(
            f"{path}: holds token id {highest}, but the model's vocabulary has {vocabulary} ids; tokenize the data "
            "with this model's tokenizer"
        )


def _append(growing: Path, texts: Sequence[list[int]], scored: Sequence[Sequence[ContinuationScore]]) -> None:
    with open(growing, "ab") as file:
        for tokens, windows in zip(texts, scored, strict=True):
            values = [0.0] * bool(tokens) + [value for window in windows for value in window.logprobs]
            file.write(np.array(values, _VALUE).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _windows(tokens: list[int], positions: int) -> list[ScoreRequest]:
    """Returns requests that score all tokens of a document except the first token."""
    return rolling_windows(tokens[1:], tokens[0], positions) if len(tokens) > 1 else []


def _is_complete(final: Path, fingerprint: str) -> bool:
    if not index_path(final).exists():
        return False
    note = _note(final)
    if note.is_file() and json.loads(note.read_text()).get("stamp") == fingerprint:
        return True
    raise DataError(
        f"{index_path(final)}: already exists, made from another model, configuration or data; remove it, or set "
        "another precompute_model_name"
    )


def _note(final: Path) -> Path:
    return final.with_name(f"{final.name}.precompute.json")


def _open_partial(ends: np.ndarray, final: Path, fingerprint: str) -> tuple[Path, int]:
    """Prepares the partial file for more documents: creates it, or truncates it to complete documents.

    Returns the file's path and the number of documents in it. Raises DataError if the folder cannot be
    written to.

    ends: 0, then the number of tokens up to the end of each document.
    """
    growing = partial_file(final, fingerprint)
    if not os.access(final.parent, os.W_OK):
        raise DataError(
            f"{final.parent}: cannot be written to, but log-probabilities are written beside the data; make it writable"
        )
    values = growing.stat().st_size // _VALUE.itemsize if growing.is_file() else 0
    done = int(np.searchsorted(ends, values, side="right")) - 1
    with open(growing, "ab") as file:
        file.truncate(int(ends[done]) * _VALUE.itemsize)
    return growing, done


def _finish(growing: Path, final: Path, dataset: IndexedDataset, fingerprint: str) -> None:
    def documents() -> Iterator[DocumentBlock]:
        # The document boundaries of the data, including empty documents
        yield dataset.sizes, np.asarray(dataset.doc_idx[1:])

    index = growing.with_name(f"{growing.name}.idx")
    write_index(index, _VALUE, documents)
    replace_file(_note(final), (json.dumps({"stamp": fingerprint}) + "\n").encode())
    publish(growing, index, final)
    sync(final.parent)
