"""`tools/score.py`: rows of chat data in, the scores of a reward model out."""

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
from megatron.data.preprocessing.inputs import InputFile, listed, resolve
from megatron.data.preprocessing.shards import InputRow
from megatron.distributed import Process, on_rank_zero
from megatron.generation.batching.memory_budget import forward_budget
from megatron.generation.chat_model import chat_model_args, with_adapters
from megatron.generation.model import load_model
from megatron.generation.progress import ProgressBar
from megatron.generation.scoring.rewards import PairReport, report_pairs, score_documents
from megatron.model import Model
from megatron.mpu import init_model_parallel
from megatron.neox_arguments import NeoXArgs
from megatron.process.run_files import to_json
from megatron.tokenizer import build_tokenizer

_ROWS_AT_ONCE = 512  # a data-parallel rank
_KEYS = (PAIR, ("messages",), ("conversation",), ("conversations",), ("completion",), ("text",))  # the first there is


@dataclass(frozen=True)
class ScoreJob:
    """What is scored, and where the scores go.

    source, split, subset: as of `inputs.resolve`. keys: columns; empty: the first of `_KEYS` that the first
    row has. tokenizer: folder or Hub name; None: the model's own. template: file of a chat template. day: ISO
    date that templates are told. overlong: refuse, truncate_left or drop. batch_size: rows of a forward.
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
    """The configuration of a reward model by its name, for so many tensor ranks and pipeline stages.
    iteration: of a folder of checkpoints; precision: instead of its own; adapter: as the key.

    Raises CheckpointError for a language model, ConfigError.
    """
    args = with_adapters(chat_model_args(name, iteration), adapter)
    if not args.score_head:
        raise CheckpointError(f"{name}: a language model, which has no scores; give a reward model (train_impl: rm)")
    changes: dict[str, Any] = {} if precision is None else {"precision": precision, "fp16": None, "bf16": None}
    return args.replace(**changes, model_parallel_size=tensor, pipe_parallel_size=pipe)


def load_reward_model(args: NeoXArgs, process: Process, logger: logging.Logger) -> Model:
    """The model of `reward_model_args` over the ranks of this process. Raises ConfigError,
    CheckpointError."""
    args = args.for_world(process.world_size)
    return load_model(args, init_model_parallel(args, process, logger), build_tokenizer(args), logger)


def score_file(model: Model, job: ScoreJob, logger: logging.Logger) -> PairReport | None:
    """Score all rows, then write the output at once, and report on them if they are pairs; the report is rank
    0's. All ranks call it together. Raises DataError, naming the row."""
    groups = model.groups
    first = groups.world_rank == 0
    readers: list[_Reader] = []  # rank 0's

    def read() -> int:
        readers.append(_Reader(model, job))
        return readers[0].total

    total = on_rank_zero(groups, read)
    reader = readers[0] if readers else None
    budget, lines, done = forward_budget(model, job.batch_size), list[dict[str, Any]](), 0
    chunks = reader.chunks(_ROWS_AT_ONCE * groups.size("data")) if reader is not None else iter(())
    with ProgressBar("scoring", total, "row", logger, shown=first) as progress:
        while done < total:
            rows = on_rank_zero(groups, lambda: next(chunks))
            documents = [document for row in rows for document in row or ()]
            report = partial(progress.advance_to_share, done, len(rows))
            found = score_documents(model, documents, budget, report)
            if not np.isfinite(found).all():
                raise CheckpointError(
                    f"the model gives NaN or Inf as scores in {model.args.params_dtype}: its weights are damaged or "
                    "precision cannot hold its activations; load another `iteration`, or set precision"
                )
            scores = iter(found)
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
    for what, count in reader.counts.items():
        if count:
            print(f"{what}: {count}")
    pairs = [line for line in lines if line.get("margin") is not None]
    return report_pairs([line["chosen"] for line in pairs], [line["rejected"] for line in pairs]) if pairs else None


class _Reader:
    """The rows of a job as the tokens that the model is given."""

    def __init__(self, model: Model, job: ScoreJob) -> None:
        self.job, self.counts = job, Counter[str]()
        day = None if job.day is None else date.fromisoformat(job.day)
        self.chat: ChatTokenizer = load_chat_tokenizer(
            job.tokenizer or str(_tokenizer_folder(model.args)), job.template, day
        )
        self.files: list[InputFile] = resolve(listed(job.source), job.split, job.subset)
        first = next(self._rows(), None)
        if first is None:
            raise DataError(f"{job.source}: holds no rows")
        self.keys = job.keys or _keys_of(first)
        self.options = ChatOptions(
            keys=self.keys, for_rm=True, max_length=model.positions, overlong=job.overlong, untrained="keep"
        )
        self.vocab = model.args.padded_vocab_size
        self.total = sum(1 for _ in self._rows())

    def _rows(self) -> Iterator[InputRow]:
        return (row for file in self.files for shard in file.shards(None) for row in shard.rows())

    def chunks(self, count: int) -> Iterator[list[list[np.ndarray] | None]]:
        """The documents of so many rows at a time; None for a row that is too long and dropped."""
        rows = self._rows()
        while some := list(islice(rows, count)):
            made, counts = encode_rows([self._prepared(row) for row in some], self.chat, self.options)
            self.counts.update(counts)
            yield [self._ids(row, one.documents) if one else None for row, one in zip(some, made, strict=True)]

    def _prepared(self, row: InputRow) -> PreparedRow:
        if self.keys != ("text",):
            return prepare(row.value(), self.chat, self.options, row.where)
        value = row.value()
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise DataError(f'{row.where()}: "text" is no text')
        self.chat.require_eos()
        end = "" if text.endswith(self.chat.hf.eos_token) else self.chat.hf.eos_token
        return PreparedRow((TextToEncode(text + end, special=True),), None, Counter(), row.where)

    def _ids(self, row: InputRow, documents: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        ids = [pieces[0].ids for pieces in documents]
        if self.vocab is not None and max(int(one.max()) for one in ids) >= self.vocab:
            raise DataError(
                f"{row.where()}: holds tokens that the model's vocabulary of {self.vocab} has not; give its own "
                "tokenizer with --tokenizer-path"
            )
        return ids

    def line(self, documents: Sequence[np.ndarray] | None, scores: Sequence[float]) -> dict[str, Any]:
        """The line of the output for a row; scores: of each of its documents."""
        names = self.keys if len(self.keys) > 1 else ("score",)
        if documents is None:
            return {**dict.fromkeys(names), "message": "dropped: longer than the model's positions"}
        line: dict[str, Any] = dict(zip(names, scores, strict=True))
        if set(PAIR) <= set(names):
            line["margin"] = line["chosen"] - line["rejected"]
        sizes = [len(document) for document in documents]
        return {**line, "tokens": sizes if len(sizes) > 1 else sizes[0]}


def _keys_of(row: InputRow) -> tuple[str, ...]:
    """The columns to score, by those that a row has. Raises DataError."""
    value = row.value()
    found: tuple[str, ...] = ("text",) if isinstance(value, str) else ()
    if isinstance(value, dict):
        found = next((keys for keys in _KEYS if all(value.get(key) is not None for key in keys)), ())
    if not found:
        columns = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise DataError(f"{row.where()}: nothing to score (found: {columns}); name the columns with --jsonl-keys")
    return found


def _tokenizer_folder(args: NeoXArgs) -> Path:
    """Where the tokenizer of a model lies, with its chat template."""
    name = str(args.load)
    if is_hf(name):
        return find_hf(name)
    path = find_checkpoint(name, args.iteration)
    folders = [path / HF_SUBFOLDER, path / "tokenizer"]
    return next(
        (folder for folder in folders if (folder / "tokenizer.json").is_file()), Path(str(args.vocab_file)).parent
    )
