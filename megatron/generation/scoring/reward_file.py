"""Implements `tools/score.py`: scores rows of chat data with a reward model, and writes the scores to a
file."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpointing import CheckpointError, find_checkpoint, replace_file
from megatron.checkpointing.huggingface import HF_SUBFOLDER, find_hf, is_hf
from megatron.data import DataError
from megatron.data.conversations.messages import PAIR
from megatron.data.preprocessing.chat_documents import encode_rows
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_rows import PreparedRow, TextToEncode, prepare
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from megatron.data.preprocessing.inputs import InputFile, resolve, split_names
from megatron.data.preprocessing.shards import InputRow
from megatron.distributed import Process, on_rank_zero
from megatron.generation.batching.memory_budget import forward_budget
from megatron.generation.chat_model import chat_model_args, with_options
from megatron.generation.model import load_model
from megatron.generation.scoring.rewards import PairReport, report_pairs, score_documents
from megatron.model import Model
from megatron.mpu import init_model_parallel
from megatron.neox_arguments import NeoXArgs
from megatron.process.progress import ProgressBar
from megatron.process.run_files import to_json
from megatron.tokenizer import build_tokenizer

_ROWS_AT_ONCE = 512  # rows per data-parallel rank that are read at once
# The columns to score by default: the first of these that a row has
_KEYS = (PAIR, ("messages",), ("conversation",), ("conversations",), ("completion",), ("text",))


@dataclass(frozen=True)
class ScoreJob:
    """The input and output of a scoring job.

    source, split, subset: names of the input, as in `inputs.resolve`.
    output: path of the JSON-lines file to write.
    keys: columns to score; empty: the first of `_KEYS` that the first row has.
    tokenizer: folder or Hub name of a tokenizer; None: the model's own.
    template: path of a chat template's file; None: the tokenizer's own.
    day: the date that chat templates see, as YYYY-MM-DD; None: today.
    overlong: what to do with rows longer than the model's positions: refuse, truncate_left or drop.
    batch_size: rows per forward pass; None: as many as memory allows.
    """

    source: str
    output: Path
    split: str | None = None
    subset: str | None = None
    keys: tuple[str, ...] = ()
    tokenizer: str | None = None
    template: str | None = None
    day: str | None = None
    overlong: str = "refuse"
    batch_size: int | None = None


def reward_model_args(
    name: str,
    *,
    iteration: int | None = None,
    precision: str | None = None,
    tensor: int = 1,
    pipe: int = 1,
    adapter: Sequence[str] = (),
) -> NeoXArgs:
    """Returns the configuration of a reward model. Raises ConfigError, or CheckpointError for a language
    model.

    name, iteration: as in `chat_model_args`.
    precision: precision to load the weights in; None: the model's own.
    tensor, pipe: number of tensor ranks, and of pipeline ranks.
    adapter: adapters to merge into the weights, as in the configuration key `adapter`.
    """
    args = with_options(chat_model_args(name, iteration), adapter, precision)
    if not args.score_head:
        raise CheckpointError(
            f"{name}: is a language model, which gives no scores; name a reward model (trained with train_impl: rm)"
        )
    return args.replace(
        model_parallel_size=tensor, pipe_parallel_size=pipe, pipeline_layers=None, pipeline_schedule="1f1b"
    )


def load_reward_model(args: NeoXArgs, process: Process, logger: logging.Logger) -> Model:
    """Loads a reward model. All ranks call this function together. Raises ConfigError, CheckpointError.

    args: the configuration that `reward_model_args` returned.
    """
    args = args.for_world(process.world_size)
    return load_model(args, init_model_parallel(args, process, logger), build_tokenizer(args), logger)


def score_file(model: Model, job: ScoreJob, logger: logging.Logger) -> PairReport | None:
    """Scores all rows of a job's input, then writes the output. Returns a report if the rows are pairs, else
    None.

    All ranks call this function together. Raises DataError, with the row's location, for an invalid row.
    """
    groups = model.groups
    is_rank_zero = groups.world_rank == 0
    readers: list[_Reader] = []  # rank 0's

    def read() -> int:
        readers.append(_Reader(model, job))
        return readers[0].total

    total = on_rank_zero(groups, read)
    reader = readers[0] if readers else None
    budget, lines, done = forward_budget(model, job.batch_size), list[dict[str, Any]](), 0
    chunks = reader.chunks(_ROWS_AT_ONCE * groups.size("data")) if reader is not None else iter(())
    with ProgressBar("scoring", total, "row", logger, visible=is_rank_zero) as progress:
        while done < total:
            rows = on_rank_zero(groups, lambda: next(chunks))
            documents = [document for row in rows for document in row or ()]
            report = partial(progress.advance_to_share, done, len(rows))
            values = score_documents(model, documents, budget, report)
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"the model's scores are NaN or Inf in {model.args.params_dtype}: its weights are damaged, or "
                    "activations overflow this precision; load another `iteration`, or set precision: fp32"
                )
            scores = iter(values)
            if reader is not None:
                lines += [reader.line(row, [next(scores) for _ in row or ()]) for row in rows]
            done += len(rows)
            progress.advance_to(done)
    return on_rank_zero(groups, lambda: _finish(job, reader, lines))


def _finish(job: ScoreJob, reader: "_Reader | None", lines: Sequence[dict[str, Any]]) -> PairReport | None:
    assert reader is not None
    job.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_file(job.output, "".join(to_json(line) + "\n" for line in lines).encode())
    except OSError as problem:
        raise DataError(f"{job.output}: cannot be written ({problem.strerror})") from problem
    print(f"{len(lines)} lines of scores are in {job.output}")
    for description, count in reader.counts.items():
        if count:
            print(f"{description}: {count}")
    pairs = [line for line in lines if line.get("margin") is not None]
    return report_pairs([line["chosen"] for line in pairs], [line["rejected"] for line in pairs]) if pairs else None


class _Reader:
    """Reads the rows of a scoring job's input and tokenizes them."""

    def __init__(self, model: Model, job: ScoreJob) -> None:
        self.job, self.counts = job, Counter[str]()
        day = None if job.day is None else date.fromisoformat(job.day)
        self.chat: ChatTokenizer = load_chat_tokenizer(
            job.tokenizer or str(_tokenizer_folder(model.args)), job.template, day
        )
        self.files: list[InputFile] = resolve(split_names(job.source), job.split, job.subset)
        row = next(self._rows(), None)
        if row is None:
            raise DataError(f"{job.source}: holds no rows to score")
        self.keys = job.keys or _keys_of(row)
        self.options = ChatOptions(
            keys=self.keys, for_rm=True, max_length=model.positions, overlong=job.overlong, untrained="keep"
        )
        self.vocab = model.args.padded_vocab_size
        self.total = sum(1 for _ in self._rows())

    def _rows(self) -> Iterator[InputRow]:
        return (row for file in self.files for shard in file.shards(None) for row in shard.rows())

    def chunks(self, count: int) -> Iterator[list[list[np.ndarray] | None]]:
        """Yields lists of up to `count` rows. Each row is a list of token ids for each of its documents, or
        None if the row is dropped because it is too long."""
        rows = self._rows()
        while chunk := list(islice(rows, count)):
            encoded, counts = encode_rows([self._prepared(row) for row in chunk], self.chat, self.options)
            self.counts.update(counts)
            yield [
                self._ids(row, encoded_row.documents) if encoded_row else None
                for row, encoded_row in zip(chunk, encoded, strict=True)
            ]

    def _prepared(self, row: InputRow) -> PreparedRow:
        if self.keys != ("text",):
            return prepare(row.value(), self.chat, self.options, row.location)
        value = row.value()
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise DataError(f'{row.location()}: "text" is empty or not a string')
        self.chat.require_eos()
        end = "" if text.endswith(self.chat.hf.eos_token) else self.chat.hf.eos_token
        return PreparedRow((TextToEncode(text + end, special=True),), None, Counter(), row.location)

    def _ids(self, row: InputRow, documents: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        ids = [pieces[0].ids for pieces in documents]
        if self.vocab is not None and max(int(document_ids.max()) for document_ids in ids) >= self.vocab:
            raise DataError(
                f"{row.location()}: has token ids outside the model's vocabulary of {self.vocab}; name the model's own "
                "tokenizer with --tokenizer-path"
            )
        return ids

    def line(self, documents: Sequence[np.ndarray] | None, scores: Sequence[float]) -> dict[str, Any]:
        """Returns the line of the output file for a row.

        documents: token ids of each document of the row (two for a pair); None if the row is dropped. scores:
            the score of each document.
        """
        names = self.keys if len(self.keys) > 1 else ("score",)
        if documents is None:
            return {**dict.fromkeys(names), "message": "dropped: longer than the model's positions"}
        line: dict[str, Any] = dict(zip(names, scores, strict=True))
        if set(PAIR) <= set(names):
            line["margin"] = line["chosen"] - line["rejected"]
        sizes = [len(document) for document in documents]
        return {**line, "tokens": sizes if len(sizes) > 1 else sizes[0]}


def _keys_of(row: InputRow) -> tuple[str, ...]:
    """Returns the columns to score: the first of `_KEYS` that the row has. Raises DataError if it has none of
    them."""
    value = row.value()
    columns_to_score: tuple[str, ...] = ("text",) if isinstance(value, str) else ()
    if isinstance(value, dict):
        columns_to_score = next((keys for keys in _KEYS if all(value.get(key) is not None for key in keys)), ())
    if not columns_to_score:
        columns = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise DataError(
            f"{row.location()}: has no known column to score (found: {columns}); name the column with --jsonl-keys"
        )
    return columns_to_score


def _tokenizer_folder(args: NeoXArgs) -> Path:
    """Returns the folder of a model's tokenizer and chat template."""
    name = str(args.load)
    if is_hf(name):
        return find_hf(name)
    path = find_checkpoint(name, args.iteration)
    folders = [path / HF_SUBFOLDER, path / "tokenizer"]
    return next(
        (folder for folder in folders if (folder / "tokenizer.json").is_file()), Path(str(args.vocab_file)).parent
    )
