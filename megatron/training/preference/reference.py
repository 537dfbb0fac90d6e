"""The reference of preference training: the model as the run began, beside the one that is trained.

Its log-probabilities are made before the first step and kept (`dpo_reference: cache`), or by a frozen copy in
every step (`on_the_fly`); both use the weights while they are still in the engine, or are there once more
before the run goes on from a checkpoint of its own. With `lora` the model without its adapters makes them.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpointing import CheckpointError, describe_changes, replace_file
from megatron.data import Batch, DataError, Datasets, Role, SampleSet, collation, rows_per_sample
from megatron.data.blending import BlendedDataset
from megatron.data.preferences.preference_dataset import PreferenceDataset, PreferenceSample
from megatron.data.preferences.reference_scores import (
    SCORES,
    ReferenceScoredDataset,
    ReferenceScores,
    Response,
    all_responses_of,
    pack_responses,
    responses_to_sample,
)
from megatron.data.run_datasets import SetContents
from megatron.data.sequences import SequenceDataset
from megatron.distributed import Watchdog, on_rank_zero, run_on_all_ranks, run_on_all_ranks_of, run_on_each_rank
from megatron.model import build_stage, eager_blocks, forward_only, materialize
from megatron.model.adapters import without_adapters
from megatron.model.init import stage_parameters
from megatron.model.norms import Norm
from megatron.model.pipeline_forward import Read
from megatron.mpu import HeadInput, Linear
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import (
    least_prefix_saving,
    loss_temperature,
    penalises_divergence,
    reference_by,
    retains_by_divergence,
    scores_reference,
)
from megatron.objectives import label_logprobs, response_sums
from megatron.process import StopRequested, look_for_stop
from megatron.training.checkpoint.resume import Checkpointer, TrainingProgress
from megatron.training.checkpoint.source import CheckpointSource, original_source
from megatron.training.compile_blocks import compile_blocks
from megatron.training.engine import Engine
from megatron.training.metrics.run_metadata import local_sizes
from megatron.training.precision_policy import choose_precision
from megatron.training.preference.reference_cache import (
    add_scores,
    cache_folder,
    changed_since,
    describe_reference,
    digest_of,
    find_whole,
    note_whole,
    read_scores,
)

Use = Callable[[Callable[..., Any]], Any]
"""`HeadInput.use` of the reference."""

_RECORD = "reference.json"  # in `save`: what the run's reference is
_TOKENS_AT_ONCE = 1 << 19  # a data-parallel rank; what an interruption loses
_CHECKED = 8  # cached rows that are scored again
# Mean difference of a token that other layouts, packings and devices make.
_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.01}
_TOLERANCE_FP8 = 0.1  # scales depend on what else is in a batch
_SAY_EVERY = 30.0  # seconds


def resume_with_reference(checkpointer: Checkpointer, watchdog: Watchdog) -> tuple[Datasets, TrainingProgress]:
    """`Checkpointer.resume`, and the reference that the objective needs: in the datasets, or filled in by the
    engine.

    Raises CheckpointError or ConfigError where it cannot be said which weights the run began with.
    """
    args, groups, datasets = checkpointer.args, checkpointer.groups, checkpointer.datasets
    if not scores_reference(args):
        return datasets, checkpointer.resume()
    if args.lora is not None:
        return datasets, _resume_with_adapters(checkpointer)
    goes_on, progress = checkpointer.source.goes_on, None
    source = on_rank_zero(groups, lambda: original_source(args)) if goes_on else checkpointer.source
    about = describe_reference(args, source, checkpointer.tokenizer, groups)
    digest = digest_of(about)
    if goes_on:
        on_rank_zero(groups, lambda: _check_record(args, source, about))
    else:
        progress = checkpointer.resume()
        if progress.iteration > 0:
            raise args.error(
                "load",
                f"goes on from iteration {progress.iteration}, and its weights would be the reference; set finetune: "
                "true to begin with them",
            )
        on_rank_zero(groups, lambda: _write_record(args, source, about))

    @cache
    def have_weights() -> None:
        if goes_on:  # else they are there
            checkpointer.logger.info(f"reference: the weights of {source.path or 'initialisation'}, as the run began")
            checkpointer.load_weights_of(source)

    if reference_by(args) == "on_the_fly":
        have_weights()
        checkpointer.engine.use_reference(frozen_copy(checkpointer.engine))
        checkpointer.logger.info(_cost_of_copy(checkpointer.engine))
    else:
        scores = _ReferenceCache(checkpointer, cache_folder(args, digest), about, have_weights, watchdog)
        try:
            scores.check(datasets)
            datasets = scores.fill(datasets)
        except StopRequested as stop:  # the run ends before its first step
            checkpointer.logger.info(
                f"reference: given up, {stop} ends the run; scored rows are kept for the next start"
            )
        watchdog.now("loading a checkpoint")
    return datasets, checkpointer.resume() if progress is None else progress


def _resume_with_adapters(checkpointer: Checkpointer) -> TrainingProgress:
    """The reference is what lies below the adapters, and there in any case.

    Raises ConfigError for a run that begins with trained adapters, which its reference would lack.
    """
    progress = checkpointer.resume()
    if not checkpointer.source.goes_on and not checkpointer.adapters_begin:
        raise checkpointer.args.error(
            "load",
            f"{checkpointer.source.path} holds trained adapters, and the reference, the model without them, would be "
            "another than the run begins with; merge them first: tools/ckpts/adapter.py merge",
        )
    checkpointer.engine.use_reference(model_without_adapters(checkpointer.engine))
    checkpointer.logger.info("reference: the model without its adapters scores every batch; it needs no copy")
    return progress


def _record(args: NeoXArgs) -> Path | None:
    return None if args.save_dir is None else Path(args.save_dir) / _RECORD


def _write_record(args: NeoXArgs, source: CheckpointSource, about: Mapping[str, Any]) -> None:
    path = _record(args)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        where = None if source.path is None else str(source.path)
        record = {"weights": where, "digest": digest_of(about), "about": about}
        replace_file(path, (json.dumps(record, indent=1) + "\n").encode())


def _check_record(args: NeoXArgs, source: CheckpointSource, about: Mapping[str, Any]) -> None:
    path = _record(args)
    assert path is not None
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing, so it is not known which weights the run in `save` began with, the reference; set save "
            "to a new folder, and load to these weights with finetune: true"
        )
    known = json.loads(path.read_text())
    if known["digest"] != digest_of(about):
        changes = describe_changes(changed_since(known["about"], about, args), args, f"the reference of {path}")
        raise CheckpointError(
            f"{changes}; the run began with {known['weights'] or 'initial values'} as reference, which is not what "
            f"{source.path or 'initialisation'} gives now: set these keys as they were, or restart: true"
        )


def _cost_of_copy(engine: Engine) -> str:
    size = local_sizes(engine.args, engine.groups.with_whole_experts(), engine.stage)[0] * engine.dtype.itemsize
    line = "reference: a frozen copy of the weights scores every batch (dpo_reference: on_the_fly): "
    line += f"{size / 2**30:.2f} GiB on this rank"
    return f"{line}, which ZeRO 3 does not cut; dpo_reference: cache needs none" if engine.zero_stage == 3 else line


def frozen_copy(engine: Engine) -> Callable[[list[Batch]], list[Batch]]:
    """A function for `Engine.use_reference`: fills `reference_logprobs` of batches with responses, and
    `reference_output` where it is asked for, by a frozen copy of the engine's present weights."""
    args, groups, weights, own_stage = engine.args, engine.groups.with_whole_experts(), engine.weights(), engine.stage
    stage = materialize(build_stage(args, groups), engine.dtype).eval().requires_grad_(False)
    for copy, own in zip(stage.modules(), own_stage.modules(), strict=True):
        if isinstance(copy, Linear) and isinstance(own, Linear):
            copy.product = own.product  # FP8 rounds both alike
        if isinstance(copy, Norm) and isinstance(own, Norm):
            copy.functions = own.functions
    compile_blocks(stage, args)
    with torch.no_grad():
        for layer, name, param in stage_parameters(stage, copies=True):
            param.copy_(weights[layer][name])

    group, columns, temperature = groups.group("tensor"), args.softmax_rows, loss_temperature(args)
    read = partial(label_logprobs, group=group, columns=columns, temperature=temperature)

    def run(batches: list[Batch], read: Read, shape: Callable[[Batch], tuple[int, ...]]) -> list[torch.Tensor]:
        with nullcontext() if own_stage.compiled else eager_blocks(stage):  # as the engine's own stage is run
            return forward_only(stage, batches, args, groups, read, dtype=engine.dtype, shape=shape)

    def logprobs(batches: list[Batch]) -> list[torch.Tensor]:
        return run(batches, read, lambda batch: tuple(batch.tokens.shape))

    return partial(_filled, logprobs, partial(_outputs, run, groups.device) if _by_divergence(args) else None)


def model_without_adapters(engine: Engine) -> Callable[[list[Batch]], list[Batch]]:
    """`frozen_copy` of nothing: the engine's own weights, for that time without what is trained beside
    them."""
    stage = engine.stage

    def logprobs(batches: list[Batch]) -> list[torch.Tensor]:
        with without_adapters(stage):
            return engine.step_logprobs(batches)

    def run(batches: list[Batch], read: Read, shape: Callable[[Batch], tuple[int, ...]]) -> list[torch.Tensor]:
        with without_adapters(stage):
            return engine.forward_only(batches, read, shape)

    def outputs(batches: list[Batch]) -> list[Use]:
        def beside(use: Use, function: Callable[..., Any]) -> Any:
            with without_adapters(stage):  # the head's copy too
                return use(function)

        return [partial(beside, use) for use in _outputs(run, engine.groups.device, batches)]

    return partial(_filled, logprobs, outputs if _by_divergence(engine.args) else None)


def _by_divergence(args: NeoXArgs) -> bool:
    """Whether batches are compared with the reference's whole distributions."""
    return retains_by_divergence(args) or penalises_divergence(args)


def _outputs(run: Callable[..., Any], device: torch.device, batches: list[Batch]) -> list[Use]:
    """What the reference's head is given in each batch: on the last stage alone, where the loss is."""
    given: list[HeadInput] = []

    def keep(head: HeadInput, batch: Batch) -> torch.Tensor:
        given.append(head)
        return torch.zeros(1, device=device)

    run(batches, keep, lambda batch: (1,))
    return [head.use for head in given]


def _filled(
    logprobs: Callable[[list[Batch]], list[torch.Tensor]],
    outputs: Callable[[list[Batch]], list[Use]] | None,
    batches: list[Batch],
) -> list[Batch]:
    """The batches with `reference_logprobs`, those of tokens where the model wrote the answers itself; or
    with `reference_output` where they are compared with the distributions that `outputs` gives."""

    def scored(some: list[Batch]) -> list[Batch]:
        if not some:
            return []
        pairs = zip(some, logprobs(some), strict=True)
        filled = [replace(batch, reference_logprobs=response_sums(values, batch)) for batch, values in pairs]
        others = [batch.kl_batch for batch in filled if batch.kl_batch is not None]
        if not others:
            return filled
        return [replace(batch, kl_batch=kl) for batch, kl in zip(filled, scored(others), strict=True)]

    def beside_distributions(some: list[Batch]) -> list[Batch]:
        uses = outputs(some) if outputs is not None and some else []
        return some if not uses else [replace(b, reference_output=u) for b, u in zip(some, uses, strict=True)]

    def beside_tokens(some: list[Batch]) -> list[Batch]:
        found = logprobs(some) if some else []
        of_answers = [batch.rollout for batch in some]
        return [
            replace(batch, rollout=replace(known, reference_logprobs=values))  # type: ignore[type-var]
            for batch, known, values in zip(some, of_answers, found, strict=True)
        ]

    def fill(chosen: Callable[[Batch], bool], by: Callable[[list[Batch]], list[Batch]], of: list[Batch]) -> list[Batch]:
        filled = iter(by([batch for batch in of if chosen(batch)]))
        return [next(filled) if chosen(batch) else batch for batch in of]

    batches = fill(lambda batch: batch.response_ids is not None, scored, batches)
    if outputs is not None:
        return fill(lambda batch: batch.role == "retain" or batch.rollout is not None, beside_distributions, batches)

    def unknown(batch: Batch) -> bool:
        known = batch.rollout if batch.response_ids is None else None  # of pairs their sums are
        return known is not None and known.reference_logprobs is None

    return fill(unknown, beside_tokens, batches)


class _ReferenceCache:
    """The scores in a folder, and the making of those that are missing. All ranks call every method
    together."""

    def __init__(
        self, run: Checkpointer, folder: Path, about: dict, have_weights: Callable[[], None], watchdog: Watchdog
    ) -> None:
        self.args, self.groups, self.engine, self.logger = run.args, run.groups, run.engine, run.logger
        self.folder, self.about, self.have_weights, self.watchdog = folder, about, have_weights, watchdog
        self.scores = ReferenceScores(on_rank_zero(self.groups, lambda: read_scores(folder)))
        self.collate = collation(self.args, None, self._role)
        in_fp8 = choose_precision(self.args, self.groups.device).recipe is not None
        self._tolerance = _TOLERANCE_FP8 if in_fp8 else _TOLERANCE[self.args.params_dtype]

    def check(self, datasets: Datasets) -> None:
        """Score some rows again. Raises DataError where the cache says something else."""
        dataset, random = next(iter(self._sets(datasets).values())), np.random.default_rng(self.args.seed)
        if dataset is None or not len(self.scores):
            return
        numbers = random.choice(len(dataset), min(len(dataset), _CHECKED), replace=False).tolist()
        rows = []
        for answers in run_on_each_rank(self.groups, lambda: [_rows_of(dataset, number) for number in numbers]):
            rows.append(answers[int(random.integers(len(answers)))])
        cached, places = self.scores.find(row.name for row in rows)
        rows, known = [row for row, hit in zip(rows, cached, strict=True) if hit], self.scores.rows[places[cached]]
        if not rows:
            return
        self.have_weights()
        rescored = self._score(rows)
        run_on_all_ranks(self.groups, lambda: self._compare(rows, known, rescored))
        self.logger.info(f"reference: {len(rows)} cached rows are what the model gives")

    def _compare(self, rows: Sequence[Response], known: np.ndarray, found: np.ndarray) -> None:
        for row, kept, now in zip(rows, known, found.tolist(), strict=True):
            within = self._tolerance * max(1, row.count)
            if kept["count"] != row.count or not abs(float(kept["sum"]) - now) <= within:
                raise DataError(
                    f"{self.folder}: a row of {row.count} trained tokens has the log-probability {kept['sum']:.4f} "
                    f"there, the model gives {now:.4f}: of another model or version; delete this folder, it is made "
                    "again"
                )

    def fill(self, datasets: Datasets) -> Datasets:
        """The datasets with references. What is not there is computed, kept and said."""
        per_eval = self.args.eval_iters * self.args.train_batch_size
        wanted = {"train": None, "valid": per_eval, "test": per_eval}
        sets = self._sets(datasets)
        counts = [0, 0]
        for name, dataset in sets.items():
            most = wanted.get(name)
            if dataset is not None and most != 0:
                size = len(dataset) if most is None else min(most, len(dataset))
                for i, count in enumerate(self._whole(name, dataset, size, datasets.contents[name])):
                    counts[i] += count
        computed, cached = counts
        self.logger.info(f"reference: {computed} rows computed, {cached} found in {self.folder}")
        changes: dict[str, Any] = {name: self._referenced(dataset) for name, dataset in sets.items()}
        return replace(datasets, **changes)

    @property
    def _role(self) -> Role:
        return "forget" if self.args.ga_dataset is not None else "train"

    def _sets(self, datasets: Datasets) -> dict[str, SampleSet | None]:
        """The sets whose answers, or sequences, are compared with the reference."""
        names = ("forget",) if self._role == "forget" else ("train", "valid", "test")
        return {name: getattr(datasets, name) for name in names}

    def _referenced(self, dataset: SampleSet | None) -> SampleSet | None:
        assert dataset is None or isinstance(dataset, PreferenceDataset | BlendedDataset | SequenceDataset)
        return None if dataset is None else ReferenceScoredDataset(dataset, self.scores)

    def _whole(self, name: str, dataset: SampleSet, size: int, set_contents: SetContents) -> tuple[int, int]:
        """`_fill_one`, unless a note of an earlier run says that all rows of this set are scored."""
        note, known = on_rank_zero(self.groups, lambda: find_whole(self.folder, set_contents, size))
        if known is not None:
            return 0, known
        counts = self._fill_one(name, dataset, size)
        on_rank_zero(self.groups, lambda: note_whole(note, sum(counts)))
        return counts

    def _fill_one(self, name: str, dataset: SampleSet, size: int) -> tuple[int, int]:
        """Distinct rows of the first `size` samples: (computed, found)."""
        rank, ranks = self.groups.rank("data"), self.groups.size("data")
        tokens = rows_per_sample(self.args) * (self.args.seq_length + 1)
        step = max(1, _TOKENS_AT_ONCE // tokens) * ranks
        seen: set[bytes] = set()
        computed, logged_at = 0, time.monotonic()
        for first in range(0, size, step):
            self.watchdog.now("computing reference log-probabilities")
            numbers = range(first + rank, min(first + step, size), ranks)
            rows = run_on_each_rank(self.groups, partial(_named, dataset, numbers))
            everyone = self._from_data_ranks(list(rows))
            saved, _ = self.scores.find(rows)
            # Each row is the work of the first rank that has it
            before = {name for names in everyone[:rank] for name in names}
            missing = [
                row for (name, row), known in zip(rows.items(), saved, strict=True) if not known and name not in before
            ]
            seen.update(*everyone)
            computed += self._add(missing)
            if time.monotonic() - logged_at > _SAY_EVERY:
                self.logger.info(f"reference: {min(first + step, size)} of {size} samples of the {name} set")
                logged_at = time.monotonic()
        return computed, len(seen) - computed

    def _add(self, rows: list[Response]) -> int:
        """Score rows, keep them, and say how many all ranks had."""
        counts = self._from_data_ranks(len(rows))
        if not sum(counts):
            return 0
        self.have_weights()
        sums = self._score(rows)
        scored = np.array([(row.name, value, row.count) for row, value in zip(rows, sums, strict=True)], SCORES)
        new = np.concatenate(self._from_data_ranks(scored))
        run_on_each_rank(self.groups, lambda: _check_finite(new))
        on_rank_zero(self.groups, lambda: add_scores(self.folder, self.about, new))
        self.scores = ReferenceScores(np.concatenate([self.scores.rows, new]))
        return sum(counts)

    def _score(self, rows: list[Response]) -> np.ndarray:
        """The sum of each row, float32. Data ranks may have different numbers of rows."""
        packed, saving = self.args.pack_impl != "unpacked", least_prefix_saving(self.args)
        samples, order = pack_responses(rows, self.args.seq_length + 1, packed, saving)
        size = self.args.train_micro_batch_size_per_gpu * rows_per_sample(self.args)
        batches = max(self._from_data_ranks(-(-len(samples) // size)))
        samples += [responses_to_sample([], self.args.seq_length + 1)] * (batches * size - len(samples))
        sums = [torch.zeros(0)]
        for chunk in self._chunks([samples[i * size : (i + 1) * size] for i in range(batches)]):
            sums += [part.cpu() for part in self.engine.scores([self.collate(items) for items in chunk])]
        scores = np.empty(len(rows), np.float32)
        scores[order] = torch.cat(sums).numpy()
        return scores

    def _chunks(self, batches: list[list]) -> Iterator[list[list]]:
        """As many micro-batches at once as keep the stages of a pipeline busy."""
        at_once = 4 * self.groups.size("pipe")
        return (batches[i : i + at_once] for i in range(0, len(batches), at_once))

    def _from_data_ranks(self, value: object) -> list:
        return run_on_all_ranks_of(self.groups.group("data"), self.groups.size("data"), lambda: value)


def _named(dataset: SampleSet, numbers: range) -> dict[bytes, Response]:
    """The distinct rows of these samples. Raises StopRequested where a stop signal comes first."""
    look_for_stop()
    return {row.name: row for number in numbers for row in _rows_of(dataset, number)}


def _rows_of(dataset: SampleSet, number: int) -> list[Response]:
    sample = dataset[number]
    assert isinstance(sample, PreferenceSample)
    return all_responses_of(sample)


def _check_finite(rows: np.ndarray) -> None:
    bad = int((~np.isfinite(rows["sum"])).sum())
    if bad:
        raise DataError(f"reference: the model gives {bad} of {len(rows)} answers no finite log-probability")
