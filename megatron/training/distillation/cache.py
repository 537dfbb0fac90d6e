"""The teacher's most likely tokens on disk: a folder named by the teacher and by how it reads, in it what was
scored, by content. Made before the first step, so that no teacher is there while the model trains."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpointing import replace_file
from megatron.data import DataError, Datasets, SampleSet, collation
from megatron.data.files import sync, temporary
from megatron.data.packed_dataset import TokenSample
from megatron.data.set_config import index_cache_dir, masked_token_ids
from megatron.data.teacher_scores import (
    ROWS,
    Shard,
    TeacherScoredDataset,
    TeacherScores,
    digest_of_tokens,
    row_name,
    token_type,
    trained_places,
)
from megatron.distributed import Watchdog, on_rank_zero, run_on_all_ranks_of, run_on_each_rank
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process import look_for_stop
from megatron.tokenizer import Tokenizer
from megatron.training.distillation.description import TeacherDescription, teacher_args
from megatron.training.distillation.teacher import Teacher, with_top_tokens
from megatron.training.preference.reference_cache import describe_reference, digest_of

_TOKENS_AT_ONCE = 1 << 17  # of a data-parallel rank; what an interruption loses
_SAY_EVERY = 30.0  # seconds


def describe_scores(
    args: NeoXArgs, description: TeacherDescription, tokenizer: Tokenizer, groups: ParallelGroups
) -> dict[str, Any]:
    """All that decides the scores of a row but what stands in it. The work is shared out over ranks."""
    assert args.distillation is not None
    about = describe_reference(teacher_args(args, description), description.source, tokenizer, groups)
    keys = ("seq_length", "reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    reading = {key: getattr(args, key) for key in keys} | {"masked": list(masked_token_ids(args))}
    scores = {key: args.distillation[key] for key in ("temperature", "top_k")} | {"columns": args.softmax_rows}
    return about | {"scope": "most likely tokens of trained places", "rows": reading, "scores": scores}


def scores_folder(args: NeoXArgs, about: dict[str, Any]) -> Path:
    """`distillation.cache_dir`, else `teacher_cache` beside the index maps; in it that of these scores."""
    assert args.distillation is not None
    given = args.distillation["cache_dir"]
    first = (args.train_data_paths or (args.data_path or "",))[0]
    return Path(given or index_cache_dir(args, first).parent / "teacher_cache") / digest_of(about)


def read_scores(folder: Path, k: int) -> TeacherScores:
    """All that a folder holds. Raises DataError for a damaged file."""
    shards = []
    for file in sorted(folder.glob("rows-*.npy")):
        top = file.with_name(file.name.replace("rows-", "top-", 1))
        try:
            rows, tokens = np.load(file, allow_pickle=False), np.load(top, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as problem:
            raise DataError(f"{file}: damaged ({problem}); delete it, it is made again") from problem
        whole = rows.dtype == ROWS and tokens.dtype == token_type(k) and len(tokens) == rows["count"].sum()
        if not whole or file.stem != f"rows-{digest_of_tokens(rows).decode()}":
            raise DataError(f"{file}: damaged; delete it, it is made again")
        shards.append(Shard(top, rows, tokens))
    return TeacherScores(shards)


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Say in the folder what its scores are of. Raises DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "about.json", (json.dumps(about, indent=1) + "\n").encode())
    except OSError as problem:
        raise _not_writable(folder, problem) from problem


def add_scores(folder: Path, scored: list[tuple[bytes, np.ndarray]]) -> None:
    """Add rows, each its name and its tokens of `token_type`, in files of their own. Raises DataError."""
    counts = [len(tokens) for _, tokens in scored]
    firsts = np.cumsum([0, *counts])[:-1]
    found = [(name, first, len(t), digest_of_tokens(t)) for (name, t), first in zip(scored, firsts, strict=True)]
    rows = np.array(found, ROWS)
    name = digest_of_tokens(rows).decode()
    try:
        for kind, array in (("top", np.concatenate([tokens for _, tokens in scored])), ("rows", rows)):
            whole = folder / f"{kind}-{name}.npy"
            with temporary(whole).open("wb") as file:
                np.save(file, array)
            sync(temporary(whole))
            temporary(whole).replace(whole)
        sync(folder)
    except OSError as problem:
        raise _not_writable(folder, problem) from problem


def _not_writable(folder: Path, problem: OSError) -> DataError:
    return DataError(
        f"{folder}: scores of the teacher cannot be written here ({problem.strerror}); set distillation.cache_dir to a "
        "folder that can be written"
    )


class TeacherCache:
    """The making of scores that are missing. All ranks call `fill` together."""

    def __init__(
        self,
        args: NeoXArgs,
        groups: ParallelGroups,
        description: TeacherDescription,
        tokenizer: Tokenizer,
        logger: logging.Logger,
        watchdog: Watchdog,
    ) -> None:
        assert args.distillation is not None
        self.args, self.groups, self.logger, self.watchdog = args, groups, logger, watchdog
        self.k: int = args.distillation["top_k"]
        self.about = describe_scores(args, description, tokenizer, groups)
        self.folder = scores_folder(args, self.about)
        self.collate = collation(args, tokenizer.eod)
        self.make_teacher: Callable[[], Teacher] = lambda: Teacher(args, description, groups, logger)
        self.teacher: Teacher | None = None

    def fill(self, datasets: Datasets) -> Datasets:
        """The datasets with scores for all that the run will train on. What is not there is computed, kept
        and said."""
        dataset, args = datasets.train, self.args
        assert dataset is not None and args.train_iters is not None
        size = min(args.train_iters * args.train_batch_size, len(dataset))
        known = run_on_each_rank(self.groups, lambda: read_scores(self.folder, self.k))
        computed, names = self._compute(dataset, size, known)
        self.teacher = None
        self.logger.info(f"distillation: {computed} rows scored, {len(names) - computed} found in {self.folder}")
        scores = run_on_each_rank(self.groups, lambda: read_scores(self.folder, self.k))
        return replace(datasets, train=TeacherScoredDataset(dataset, scores))  # type: ignore[arg-type]

    def _compute(self, dataset: SampleSet, size: int, known: TeacherScores) -> tuple[int, set[bytes]]:
        """(rows scored, names of all rows of the first `size` samples)."""
        rank, ranks = self.groups.rank("data"), self.groups.size("data")
        step = max(1, _TOKENS_AT_ONCE // self.args.seq_length) * ranks
        seen: set[bytes] = set()
        computed, logged_at = 0, time.monotonic()
        for first in range(0, size, step):
            self.watchdog.now("asking the teacher")
            own = range(first + rank, min(first + step, size), ranks)
            rows = run_on_each_rank(self.groups, partial(_rows_of, dataset, own))
            everyone = self._from_data_ranks(list(rows))
            done = seen.union(*everyone[:rank])  # each row is the work of the first rank that has it
            missing = {name: row for name, row in rows.items() if name not in done and name not in known}
            seen.update(*everyone)
            computed += self._add(missing)
            if time.monotonic() - logged_at > _SAY_EVERY:
                self.logger.info(f"distillation: {min(first + step, size)} of {size} rows are scored")
                logged_at = time.monotonic()
        return computed, seen

    def _add(self, rows: dict[bytes, TokenSample]) -> int:
        """Score rows and keep them. Data ranks may have different numbers of rows."""
        counts = self._from_data_ranks(len(rows))
        if not sum(counts):
            return 0
        if self.teacher is None:
            on_rank_zero(self.groups, lambda: write_about(self.folder, self.about))
            self.teacher = self.make_teacher()
        scored = self._score(rows)
        writes = self.groups.is_last_stage and self.groups.rank("tensor") == 0 and bool(scored)
        run_on_each_rank(self.groups, lambda: add_scores(self.folder, scored) if writes else None)
        return sum(counts)

    def _score(self, rows: dict[bytes, TokenSample]) -> list[tuple[bytes, np.ndarray]]:
        """Name and tokens of each row; [] on stages before the last."""
        assert self.teacher is not None
        size, named = self.args.train_micro_batch_size_per_gpu, list(rows.items())
        found: list[tuple[bytes, np.ndarray]] = []
        parts = [named[i : i + size] for i in range(0, len(named), size)]
        at_once = 4 * self.groups.size("pipe")  # keeps the stages of a pipeline busy
        for first in range(0, len(parts), at_once):
            chunk = parts[first : first + at_once]
            # All of one shape: the last is filled up with its first row
            filled = [[row for _, row in part + part[:1] * (size - len(part))] for part in chunk]
            batches = [self.collate(samples).to(self.groups.device) for samples in filled]
            for part, batch, top in zip(chunk, batches, self.teacher.top_tokens(batches), strict=False):
                with_top = with_top_tokens(batch, top)
                assert with_top.top_ids is not None and with_top.top_logprobs is not None
                ids, logprobs = with_top.top_ids.cpu().numpy(), with_top.top_logprobs.cpu().numpy()
                for (name, row), row_ids, row_logprobs in zip(part, ids, logprobs, strict=False):
                    places = trained_places(row)
                    tokens = np.empty(len(places), token_type(self.k))
                    tokens["ids"], tokens["logprobs"] = row_ids[places], row_logprobs[places]
                    found.append((name, tokens))
        run_on_each_rank(self.groups, lambda: _check_finite(found))
        return found

    def _from_data_ranks(self, value: object) -> list:
        return run_on_all_ranks_of(self.groups.group("data"), self.groups.size("data"), lambda: value)


def _rows_of(dataset: SampleSet, numbers: range) -> dict[bytes, TokenSample]:
    """The distinct rows of these samples. Raises StopRequested where a stop signal comes first."""
    look_for_stop()
    rows = [dataset[number] for number in numbers]
    return {row_name(row): row for row in rows if isinstance(row, TokenSample)}


def _check_finite(scored: list[tuple[bytes, np.ndarray]]) -> None:
    bad = sum(not np.isfinite(tokens["logprobs"]).all() for _, tokens in scored)
    if bad:
        raise DataError(f"distillation: the teacher gives {bad} of {len(scored)} rows no finite log-probability")
