"""Caches a teacher's most likely tokens on disk before the first step, so that training runs without the
teacher.

Each combination of teacher and settings has its own folder. Within it, a row of tokens is found by a hash of
its content.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.checkpointing import replace_file
from megatron.data import DataError, Datasets, SampleSet, collation
from megatron.data.files import NPY_ERRORS, sync, temporary
from megatron.data.packed_dataset import TokenSample, TopRow
from megatron.data.run_datasets import WrappedSet
from megatron.data.set_config import index_cache_dir, masked_token_ids
from megatron.distributed import Watchdog, on_rank_zero, run_on_all_ranks_of, run_on_each_rank
from megatron.methods.distillation.description import TeacherDescription, teacher_args
from megatron.methods.distillation.keys import distillation_keys
from megatron.methods.distillation.objective import teacher_values
from megatron.methods.distillation.teacher import Teacher, with_top_tokens
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process import look_for_stop
from megatron.tokenizer import Tokenizer
from megatron.training.reference.cache import describe_reference, digest_of

_TOKENS_AT_ONCE = 1 << 17  # scored by a data-parallel rank between two writes; an interruption loses these
_SAY_EVERY = 30.0  # seconds between log lines


# One record per row of tokens. name: from `row_name`; first, count: the range of its trained tokens in the
# file of tokens; digest: hash of the records of these tokens.
ROWS = np.dtype([("name", "S32"), ("first", "<i8"), ("count", "<i4"), ("digest", "S32")])


def token_type(k: int) -> np.dtype:
    """Returns the numpy record type for the teacher's scores at one position of a row.

    ids: the k most likely next tokens. logprobs: their log-probabilities, then one for all other tokens
        together.
    """
    return np.dtype([("ids", "<i4", (k,)), ("logprobs", "<f4", (k + 1,))])


def trained_places(sample: TokenSample) -> np.ndarray:
    """Returns the indices of a row's trained labels. Index 0 is the label of the first position, the second
    token."""
    return np.flatnonzero(sample.labels[1:] >= 0)


def row_name(sample: TokenSample) -> bytes:
    """Returns a hash of the row's tokens, trained positions and document starts, as 32 hexadecimal digits."""
    digest = hashlib.blake2b(sample.tokens.astype("<i8").tobytes(), digest_size=16)
    digest.update((sample.labels >= 0).tobytes() + sample.begins.tobytes() + bytes([sample.labelled]))
    return digest.hexdigest().encode()


def digest_of_tokens(tokens: np.ndarray) -> bytes:
    """Returns a hash of an array of numpy records, as 32 hexadecimal digits."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest().encode()


class Shard(NamedTuple):
    """A teacher's scores from one pair of files.

    rows: records of type `ROWS`, one for each row.
    tokens: memory-mapped records of `token_type`, one for each trained token of these rows.
    """

    file: Path
    rows: np.ndarray
    tokens: np.ndarray


class TeacherScores:
    """Looks up a teacher's scores of a row by the row's hash (`row_name`).

    If several shards have scores of the same row, the first ones are used.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        names = np.concatenate([np.empty(0, "S32"), *(shard.rows["name"] for shard in shards)])
        self.names, first_indices = np.unique(names, return_index=True)
        sizes = np.array([len(shard.rows) for shard in shards], np.int64)
        self._shard = np.repeat(np.arange(len(shards)), sizes)[first_indices]
        self._row = first_indices - (np.cumsum(sizes) - sizes)[self._shard]

    def __contains__(self, name: bytes) -> bool:
        return self._find(name) is not None

    def _find(self, name: bytes) -> int | None:
        place = int(np.searchsorted(self.names, np.array(name, "S32")))
        return place if place < len(self.names) and self.names[place] == name else None

    def with_top(self, sample: TokenSample) -> TokenSample:
        """Returns the sample with `top` set to the teacher's most likely tokens at each position.

        Raises DataError if the sample has no scores, or if its score file is damaged.
        """
        place = self._find(row_name(sample))
        if place is None:
            raise DataError(
                "the cache has no teacher scores for a row of the training data: the data has changed since this "
                "start filled the cache; start the run again, which scores the new rows"
            )
        shard = self.shards[self._shard[place]]
        row = shard.rows[self._row[place]]
        tokens = shard.tokens[row["first"] : row["first"] + row["count"]]
        if digest_of_tokens(tokens) != row["digest"]:
            raise DataError(
                f"{shard.file}: damaged: the teacher's scores do not match their checksum; delete this file, the next "
                "start computes them again"
            )
        places, k = trained_places(sample), tokens["ids"].shape[1]
        ids = np.zeros((len(sample.tokens) - 1, k), np.int64)
        logprobs = np.zeros((len(sample.tokens) - 1, k + 1), np.float32)
        ids[places], logprobs[places] = tokens["ids"], tokens["logprobs"]
        return replace(sample, top=TopRow(ids, logprobs))


class TeacherScoredDataset(WrappedSet):
    """Wraps a dataset and adds the teacher's most likely tokens to each sample, as `TokenSample.top`."""

    def __init__(self, dataset: SampleSet, scores: TeacherScores) -> None:
        super().__init__(dataset)
        self.scores = scores

    def __getitem__(self, index: int) -> TokenSample:
        sample = self.dataset[index]
        assert isinstance(sample, TokenSample)
        return self.scores.with_top(sample)


def describe_scores(
    args: NeoXArgs, description: TeacherDescription, tokenizer: Tokenizer, groups: ParallelGroups
) -> dict[str, Any]:
    """Returns all settings that the teacher's scores of a row depend on, besides the row's tokens.

    All ranks must call it together.
    """
    record = describe_reference(teacher_args(args, description), description.source, tokenizer, groups)
    keys = ("seq_length", "reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    reading = {key: getattr(args, key) for key in keys} | {"masked": list(masked_token_ids(args))}
    options = distillation_keys(args)
    scores = {key: options[key] for key in ("temperature", "top_k")} | {"columns": args.softmax_rows}
    return record | {"scope": "most likely tokens of trained places", "rows": reading, "scores": scores}


def scores_folder(args: NeoXArgs, record: dict[str, Any]) -> Path:
    """Returns the folder for scores with these settings: a hash of `record` names it.

    It is in `distillation.cache_dir`, or, if that is unset, in `teacher_cache` next to the dataset's index
    maps.
    """
    cache_dir = distillation_keys(args)["cache_dir"]
    first_path = (args.train_data_paths or (args.data_path or "",))[0]
    return Path(cache_dir or index_cache_dir(args, first_path).parent / "teacher_cache") / digest_of(record)


def read_scores(folder: Path, k: int) -> TeacherScores:
    """Returns all scores in a folder. k: the number of tokens per position. Raises DataError for a damaged
    file."""
    shards = []
    for file in sorted(folder.glob("rows-*.npy")):
        top = file.with_name(file.name.replace("rows-", "top-", 1))
        try:
            rows, tokens = np.load(file, allow_pickle=False), np.load(top, mmap_mode="r", allow_pickle=False)
        except NPY_ERRORS as problem:
            raise DataError(
                f"{file}: damaged: the teacher's scores cannot be read ({problem}); delete this file, the next start "
                "computes them again"
            ) from problem
        is_complete = rows.dtype == ROWS and tokens.dtype == token_type(k) and len(tokens) == rows["count"].sum()
        if not is_complete or file.stem != f"rows-{digest_of_tokens(rows).decode()}":
            raise DataError(
                f"{file}: damaged: the teacher's scores have a wrong checksum, type or length; delete this file, the "
                "next start computes them again"
            )
        shards.append(Shard(top, rows, tokens))
    return TeacherScores(shards)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes the settings of the scores to `about.json` in their folder. Raises DataError if this fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "about.json", (json.dumps(record, indent=1) + "\n").encode())
    except OSError as problem:
        raise _not_writable(folder, problem) from problem


def add_scores(folder: Path, scored: list[tuple[bytes, np.ndarray]]) -> None:
    """Writes scores of rows to a new pair of files in the folder. Raises DataError if this fails.

    scored: for each row its hash (`row_name`), and its array of records of `token_type`.
    """
    counts = [len(tokens) for _, tokens in scored]
    firsts = np.cumsum([0, *counts])[:-1]
    entries = [(name, start, len(t), digest_of_tokens(t)) for (name, t), start in zip(scored, firsts, strict=True)]
    rows = np.array(entries, ROWS)
    name = digest_of_tokens(rows).decode()
    try:
        for kind, array in (("top", np.concatenate([tokens for _, tokens in scored])), ("rows", rows)):
            target = folder / f"{kind}-{name}.npy"
            with temporary(target).open("wb") as file:
                np.save(file, array)
            sync(temporary(target))
            temporary(target).replace(target)
        sync(folder)
    except OSError as problem:
        raise _not_writable(folder, problem) from problem


def _not_writable(folder: Path, problem: OSError) -> DataError:
    return DataError(
        f"{folder}: the teacher's scores cannot be written here ({problem.strerror}); set distillation.cache_dir to a "
        "writable folder"
    )


class TeacherCache:
    """Fills the cache of teacher scores before training. All ranks call `fill` together."""

    def __init__(
        self,
        args: NeoXArgs,
        groups: ParallelGroups,
        description: TeacherDescription,
        tokenizer: Tokenizer,
        logger: logging.Logger,
        watchdog: Watchdog,
    ) -> None:
        self.args, self.groups, self.logger, self.watchdog = args, groups, logger, watchdog
        self.k: int = distillation_keys(args)["top_k"]
        self.record = describe_scores(args, description, tokenizer, groups)
        self.folder = scores_folder(args, self.record)
        self.collate = collation(args, tokenizer.eod)
        self.make_teacher: Callable[[], Teacher] = lambda: Teacher(args, description, groups, logger)
        self.teacher: Teacher | None = None

    def fill(self, datasets: Datasets) -> Datasets:
        """Returns the datasets with the teacher's most likely tokens in every training row.

        Rows that the cache lacks are scored by the teacher and added to the cache. The numbers of scored and
        cached rows are logged.
        """
        dataset, args = datasets.train, self.args
        assert dataset is not None and args.train_iters is not None
        size = min(args.train_iters * args.train_batch_size, len(dataset))
        cached = run_on_each_rank(self.groups, lambda: read_scores(self.folder, self.k))
        computed, names = self._compute(dataset, size, cached)
        self.teacher = None
        self.logger.info(
            f"distillation: teacher scored {computed} rows, found {len(names) - computed} already in {self.folder}"
        )
        scores = run_on_each_rank(self.groups, lambda: read_scores(self.folder, self.k))
        return replace(datasets, train=TeacherScoredDataset(dataset, scores))

    def _compute(self, dataset: SampleSet, size: int, cached: TeacherScores) -> tuple[int, set[bytes]]:
        """Scores the rows that the cache lacks, among the first `size` samples.

        Returns the number of rows that were scored, and the hashes of all rows of these samples.
        """
        rank, ranks = self.groups.rank("data"), self.groups.size("data")
        step = max(1, _TOKENS_AT_ONCE // self.args.seq_length) * ranks
        names: set[bytes] = set()
        computed, logged_at = 0, time.monotonic()
        for start in range(0, size, step):
            self.watchdog.now("scoring rows with the teacher")
            numbers = range(start + rank, min(start + step, size), ranks)
            rows = run_on_each_rank(self.groups, partial(_rows_of, dataset, numbers))
            everyone = self._from_data_ranks(list(rows))
            done = names.union(*everyone[:rank])  # a row on several ranks is scored by the first of them
            missing = {name: row for name, row in rows.items() if name not in done and name not in cached}
            names.update(*everyone)
            computed += self._add(missing)
            if time.monotonic() - logged_at > _SAY_EVERY:
                self.logger.info(f"distillation: teacher scores of {min(start + step, size)} of {size} rows are cached")
                logged_at = time.monotonic()
        return computed, names

    def _add(self, rows: dict[bytes, TokenSample]) -> int:
        """Scores this rank's rows and writes the scores to the cache. Returns the number of rows over all
        data ranks.

        Data ranks may have different numbers of rows.
        """
        counts = self._from_data_ranks(len(rows))
        if not sum(counts):
            return 0
        if self.teacher is None:
            on_rank_zero(self.groups, lambda: write_record(self.folder, self.record))
            self.teacher = self.make_teacher()
        scored = self._score(rows)
        is_first = self.groups.rank("tensor") == self.groups.rank("context") == 0  # of ranks that score these rows
        writes = self.groups.is_last_stage and is_first and bool(scored)
        run_on_each_rank(self.groups, lambda: add_scores(self.folder, scored) if writes else None)
        return sum(counts)

    def _score(self, rows: dict[bytes, TokenSample]) -> list[tuple[bytes, np.ndarray]]:
        """Returns (hash, token records) of each row; [] on pipeline stages before the last."""
        assert self.teacher is not None
        size, named_rows = self.args.train_micro_batch_size_per_gpu, list(rows.items())
        scored: list[tuple[bytes, np.ndarray]] = []
        parts = [named_rows[i : i + size] for i in range(0, len(named_rows), size)]
        at_once = 4 * self.groups.size("pipe")  # keeps the stages of a pipeline busy
        for start in range(0, len(parts), at_once):
            chunk = parts[start : start + at_once]
            # All micro-batches have one shape: an incomplete one is filled up with copies of its first row
            filled = [[row for _, row in part + part[:1] * (size - len(part))] for part in chunk]
            batches = [self.collate(samples).to(self.groups.device) for samples in filled]
            for part, batch, top in zip(chunk, batches, self.teacher.top_tokens(batches), strict=False):
                values = teacher_values(with_top_tokens(batch, top))
                assert values.top_ids is not None and values.top_logprobs is not None
                ids, logprobs = values.top_ids.cpu().numpy(), values.top_logprobs.cpu().numpy()
                for (name, row), row_ids, row_logprobs in zip(part, ids, logprobs, strict=False):
                    places = trained_places(row)
                    tokens = np.empty(len(places), token_type(self.k))
                    tokens["ids"], tokens["logprobs"] = row_ids[places], row_logprobs[places]
                    scored.append((name, tokens))
        run_on_each_rank(self.groups, lambda: _check_finite(scored))
        return scored

    def _from_data_ranks(self, value: object) -> list:
        return run_on_all_ranks_of(self.groups.group("data"), self.groups.size("data"), lambda: value)


def _rows_of(dataset: SampleSet, numbers: range) -> dict[bytes, TokenSample]:
    """Returns the distinct rows among the samples with these indices, by hash.

    Raises StopRequested after a stop signal.
    """
    look_for_stop()
    rows = [dataset[number] for number in numbers]
    return {row_name(row): row for row in rows if isinstance(row, TokenSample)}


def _check_finite(scored: list[tuple[bytes, np.ndarray]]) -> None:
    bad = sum(not np.isfinite(tokens["logprobs"]).all() for _, tokens in scored)
    if bad:
        raise DataError(
            f"distillation: the teacher's log-probabilities are not finite (NaN or infinite) in {bad} of {len(scored)} "
            "rows; check the teacher's weights, or try another precision"
        )
