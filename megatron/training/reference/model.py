"""Sets up the reference model of preference training: the model with the weights that the run started from.

Its log-probabilities are cached before the first step (`dpo_reference: cache`), or a frozen copy of the model
computes them in every step (`on_the_fly`). Both take the start weights from the engine. A resumed run first
loads the start weights into the engine, then its own checkpoint. With `lora` the reference is the model
without adapters.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpointing import CheckpointError, describe_changes, replace_file
from megatron.data import Batch, DataError, Datasets, SampleSet, rows_per_sample
from megatron.data.preferences.preference_dataset import PreferenceSample
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
from megatron.distributed import Watchdog, on_rank_zero, run_on_all_ranks, run_on_all_ranks_of, run_on_each_rank
from megatron.model import build_stage, eager_blocks, forward_only, materialize, with_context
from megatron.model.init import stage_parameters
from megatron.model.lora import without_adapters
from megatron.model.moe.experts import Experts
from megatron.model.norms import Norm
from megatron.model.pipeline_forward import Read, Shape
from megatron.mpu import HeadInput, Linear
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.json_text import parse_json
from megatron.neox_arguments.values.losses import (
    least_prefix_saving,
    loss_temperature,
    reference_mode,
    scores_reference,
)
from megatron.objectives import HeadUse, label_logprobs
from megatron.process import StopRequested, look_for_stop
from megatron.training.checkpoint.resume import CheckpointLoader
from megatron.training.checkpoint.run_parts import TrainingProgress
from megatron.training.checkpoint.source import CheckpointSource, original_source
from megatron.training.compile_blocks import compile_blocks
from megatron.training.engine import Engine
from megatron.training.method import Method
from megatron.training.metrics.run_metadata import local_sizes
from megatron.training.precision_policy import choose_precision
from megatron.training.reference.cache import (
    add_scores,
    cache_folder,
    describe_reference,
    describe_reference_changes,
    digest_of,
    find_completion,
    note_completion,
    read_scores,
)

_RECORD = "reference.json"  # in `save`: describes the run's reference
_TOKENS_AT_ONCE = 1 << 19  # tokens per data-parallel rank between two saves, at most lost by an interruption
_CHECKED = 8  # number of cached rows that are scored again
# The allowed difference per token, which other layouts, packings and devices may cause.
_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.01}
_TOLERANCE_FP8 = 0.1  # scales depend on the other rows of a batch
_SAY_EVERY = 30.0  # seconds


def resume_with_reference(
    loader: CheckpointLoader, method: Method, watchdog: Watchdog
) -> tuple[Datasets, TrainingProgress]:
    """Load the run's start or checkpoint, and set up the reference model if the objective needs one.

    Returns datasets and progress. With `dpo_reference: cache` the datasets get the reference's scores, else
    the engine computes them in each step.
    Raises CheckpointError or ConfigError if the weights that the run started from are unknown.
    """
    args, groups, datasets = loader.args, loader.groups, loader.run.datasets
    if not scores_reference(args):
        return datasets, loader.resume()
    if args.lora is not None:
        return datasets, _resume_with_adapters(loader)
    goes_on, progress = loader.source.goes_on, None
    source = on_rank_zero(groups, lambda: original_source(args)) if goes_on else loader.source
    description = describe_reference(args, source, loader.run.tokenizer, groups)
    digest = digest_of(description)
    if goes_on:
        on_rank_zero(groups, lambda: _check_record(args, source, description))
    else:
        progress = loader.resume()
        if progress.iteration > 0:
            raise args.error(
                "load",
                f"the run resumes at iteration {progress.iteration}, but its reference must be the weights that it "
                "started from; set finetune: true to start at iteration 0 from the loaded weights",
            )
        on_rank_zero(groups, lambda: _write_record(args, source, description))

    @cache
    def have_weights() -> None:
        if goes_on:  # else the engine has them already
            loader.logger.info(f"reference: loading the run's start weights, {source.path or 'initialisation'}")
            loader.load_weights_of(source)

    if reference_mode(args) == "on_the_fly":
        have_weights()
        loader.engine.use_reference(frozen_copy(loader.engine))
        loader.logger.info(_cost_of_copy(loader.engine))
    else:
        scores = _ReferenceCache(loader, method, cache_folder(args, digest), description, have_weights, watchdog)
        try:
            scores.check(datasets)
            datasets = scores.fill(datasets)
        except StopRequested as stop:  # the run ends before its first step
            loader.logger.info(f"reference: {stop} ends the run; the rows scored so far are kept for the next start")
        watchdog.now("loading a checkpoint")
    return datasets, loader.resume() if progress is None else progress


def _resume_with_adapters(loader: CheckpointLoader) -> TrainingProgress:
    """Resume a run with `lora`, whose reference is the model without its adapters. Returns its progress.

    Raises ConfigError if the run starts from trained adapters, because the reference would lack them.
    """
    progress = loader.resume()
    if not loader.source.goes_on and not loader.adapters_begin:
        raise loader.args.error(
            "load",
            f"{loader.source.path} holds trained adapters, but the reference would be the model without them, "
            "not the start of this run; merge the adapters first: tools/ckpts/adapter.py merge",
        )
    loader.engine.use_reference(model_without_adapters(loader.engine))
    loader.logger.info("reference: the model without its adapters scores every batch; it needs no copy")
    return progress


def _record(args: NeoXArgs) -> Path | None:
    return None if args.save_dir is None else Path(args.save_dir) / _RECORD


def _write_record(args: NeoXArgs, source: CheckpointSource, description: Mapping[str, Any]) -> None:
    path = _record(args)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        source_path = None if source.path is None else str(source.path)
        record = {"weights": source_path, "digest": digest_of(description), "about": description}
        replace_file(path, (json.dumps(record, indent=1) + "\n").encode())


def _check_record(args: NeoXArgs, source: CheckpointSource, description: Mapping[str, Any]) -> None:
    path = _record(args)
    assert path is not None
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so the reference (the weights that the run in `save` started from) is unknown; set "
            "save to a new folder, and load to those weights with finetune: true"
        )
    try:
        saved = parse_json(path.read_bytes())
        changed = saved["digest"] != digest_of(description)
        old_description, weights = saved["about"], saved["weights"] or "initial values"
    except (ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(
            f"{path}: damaged ({problem}), so the reference (the weights that the run in `save` started from) is "
            "unknown; restore the file, or set save to a new folder, and load to those weights with finetune: true"
        ) from problem
    if changed:
        changes = describe_changes(
            describe_reference_changes(old_description, description, args), args, f"the reference of {path}"
        )
        raise CheckpointError(
            f"{changes}; the run's reference was made from {weights}, and "
            f"{source.path or 'initialisation'} gives another one now; restore these keys, or set restart: true"
        )


def _cost_of_copy(engine: Engine) -> str:
    size = local_sizes(engine.args, engine.groups.with_replicated_experts(), engine.stage)[0] * engine.dtype.itemsize
    line = "reference: a frozen copy of the weights scores every batch (dpo_reference: on_the_fly): "
    line += f"{size / 2**30:.2f} GiB on this rank"
    return f"{line}, not sharded by ZeRO 3; dpo_reference: cache needs no copy" if engine.zero_stage == 3 else line


@dataclass(frozen=True)
class ReferenceModel:
    """A reference model, with whose outputs losses compare those of the trained model
    (`objectives.Reference`).

    run: runs it on micro-batches, as `Engine.forward_only`. logprobs: returns log p(label) `[batch, seq]` of
    each micro-batch. context: a context in which its output layer must be used, such as with adapters turned
    off.
    """

    device: torch.device
    run: Callable[[list[Batch], Read, Shape], list[torch.Tensor]]
    logprobs: Callable[[list[Batch]], list[torch.Tensor]]
    context: Callable[[], AbstractContextManager[None]] = nullcontext

    def outputs(self, batches: list[Batch]) -> list[HeadUse]:
        """Returns, for each micro-batch, a function that applies a function to hidden states and output
        layer.

        The list is empty on pipeline stages before the last.
        """
        heads: list[HeadInput] = []

        def keep(head: HeadInput, batch: Batch) -> torch.Tensor:
            heads.append(head)
            return torch.zeros(1, device=self.device)

        self.run(batches, keep, lambda batch: (1,))
        return [partial(self._use, head) for head in heads]

    def _use(self, head: HeadInput, function: Callable[..., Any]) -> Any:
        with self.context():
            return head.use(function)


def frozen_copy(engine: Engine) -> Callable[[list[Batch]], list[Batch]]:
    """Returns a function for `Engine.use_reference`; its reference model is a frozen copy of the engine's
    weights."""
    args, groups = engine.args, engine.groups.with_replicated_experts()
    weights, own_stage = engine.weights(), engine.stage
    stage = materialize(build_stage(args, groups), engine.dtype).eval().requires_grad_(False)
    for copy, own_module in zip(stage.modules(), own_stage.modules(), strict=True):
        # So that FP8 rounds both in the same way.
        if isinstance(copy, Linear) and isinstance(own_module, Linear):
            copy.product = own_module.product
        if isinstance(copy, Experts) and isinstance(own_module, Experts):
            copy.product = own_module.product
        if isinstance(copy, Norm) and isinstance(own_module, Norm):
            copy.functions = own_module.functions
    compile_blocks(stage, args)
    with torch.no_grad():
        for layer, name, param in stage_parameters(stage, copies=True):
            param.copy_(weights[layer][name])

    group, columns, temperature = groups.group("tensor"), args.softmax_rows, loss_temperature(args)
    read = partial(label_logprobs, group=group, columns=columns, temperature=temperature)

    def run(batches: list[Batch], read: Read, shape: Shape) -> list[torch.Tensor]:
        with nullcontext() if own_stage.compiled else eager_blocks(stage):  # in the same way as the engine's own stage
            parts = [with_context(batch, args, groups) for batch in batches]
            return forward_only(stage, parts, args, groups, read, dtype=engine.dtype, shape=shape)

    def logprobs(batches: list[Batch]) -> list[torch.Tensor]:
        return run(batches, read, lambda batch: tuple(batch.tokens.shape))

    return _compared(engine, ReferenceModel(groups.device, run, logprobs))


def model_without_adapters(engine: Engine) -> Callable[[list[Batch]], list[Batch]]:
    """Returns a function for `Engine.use_reference`; its reference model is the engine's with adapters turned
    off.

    So no copy of the weights is needed.
    """
    stage = engine.stage

    def logprobs(batches: list[Batch]) -> list[torch.Tensor]:
        with without_adapters(stage):
            return engine.step_logprobs(batches)

    def run(batches: list[Batch], read: Read, shape: Shape) -> list[torch.Tensor]:
        with without_adapters(stage):
            return engine.forward_only(batches, read, shape)

    context = partial(without_adapters, stage)  # turns off a trained copy of the head, too
    return _compared(engine, ReferenceModel(engine.groups.device, run, logprobs, context))


def _compared(engine: Engine, reference: ReferenceModel) -> Callable[[list[Batch]], list[Batch]]:
    assert engine.objective.with_reference is not None, "the loss uses no reference model"
    with_reference = engine.objective.with_reference
    return lambda batches: with_reference(batches, reference)


class _ReferenceCache:
    """Reads the cached scores of a reference model and computes missing ones. All ranks call its methods
    together."""

    def __init__(
        self,
        loader: CheckpointLoader,
        method: Method,
        folder: Path,
        description: dict,
        have_weights: Callable[[], None],
        watchdog: Watchdog,
    ) -> None:
        self.args, self.groups, self.engine, self.logger = loader.args, loader.groups, loader.engine, loader.logger
        self.folder, self.description, self.have_weights, self.watchdog = folder, description, have_weights, watchdog
        self.scores = ReferenceScores(on_rank_zero(self.groups, lambda: read_scores(folder)))
        self.sets = method.sets_with_responses
        self.collate = method.response_collation(self.args)
        in_fp8 = choose_precision(self.args, self.groups.device).recipe is not None
        self._tolerance = _TOLERANCE_FP8 if in_fp8 else _TOLERANCE[self.args.params_dtype]

    def check(self, datasets: Datasets) -> None:
        """Score a few cached rows again. Raises DataError if the cache has other values for them."""
        dataset, random = datasets.get(self.sets[0]), np.random.default_rng(self.args.seed)
        if dataset is None or not len(self.scores):
            return
        numbers = random.choice(len(dataset), min(len(dataset), _CHECKED), replace=False).tolist()
        rows = []
        for answers in run_on_each_rank(self.groups, lambda: [_rows_of(dataset, number) for number in numbers]):
            rows.append(answers[int(random.integers(len(answers)))])
        cached, places = self.scores.find(row.name for row in rows)
        rows, expected = [row for row, hit in zip(rows, cached, strict=True) if hit], self.scores.rows[places[cached]]
        if not rows:
            return
        self.have_weights()
        rescored = self._score(rows)
        run_on_all_ranks(self.groups, lambda: self._compare(rows, expected, rescored))
        self.logger.info(f"reference: checked {len(rows)} cached rows, the model gives the same values")

    def _compare(self, rows: Sequence[Response], expected: np.ndarray, rescored: np.ndarray) -> None:
        for row, cached, now in zip(rows, expected, rescored.tolist(), strict=True):
            tolerance = self._tolerance * max(1, row.count)
            if cached["count"] != row.count or not abs(float(cached["sum"]) - now) <= tolerance:
                raise DataError(
                    f"{self.folder}: a cached answer of {row.count} trained tokens has log-probability "
                    f"{cached['sum']:.4f}, but the model gives {now:.4f}, so another model or program version made the "
                    "cache; delete the folder, and the next start rebuilds it"
                )

    def fill(self, datasets: Datasets) -> Datasets:
        """Returns the datasets with reference scores. Missing scores are computed and added to the cache."""
        per_eval = self.args.eval_iters * self.args.train_batch_size
        num_samples = {"train": None, "valid": per_eval, "test": per_eval}
        sets = {name: datasets.get(name) for name in self.sets}
        counts = [0, 0]
        for name, dataset in sets.items():
            limit = num_samples.get(name)
            if dataset is not None and limit != 0:
                size = len(dataset) if limit is None else min(limit, len(dataset))
                for i, count in enumerate(self._fill_unless_complete(name, dataset, size, datasets.contents[name])):
                    counts[i] += count
        computed, cached = counts
        self.logger.info(f"reference: scored {computed} answers, found {cached} in {self.folder}")
        scored = {name: None if d is None else ReferenceScoredDataset(d, self.scores) for name, d in sets.items()}
        return datasets.with_sets(scored)

    def _fill_unless_complete(
        self, name: str, dataset: SampleSet, size: int, set_contents: SetContents
    ) -> tuple[int, int]:
        """Score the missing rows of a set, unless a note of an earlier run says that all are scored.

        Returns the numbers of distinct rows (computed, found).
        """
        note, num_rows = on_rank_zero(self.groups, lambda: find_completion(self.folder, set_contents, size))
        if num_rows is not None:
            return 0, num_rows
        counts = self._fill_one(name, dataset, size)
        on_rank_zero(self.groups, lambda: note_completion(note, sum(counts)))
        return counts

    def _fill_one(self, name: str, dataset: SampleSet, size: int) -> tuple[int, int]:
        """Score the missing rows of a set's first `size` samples.

        Returns the numbers of distinct rows (computed, found). name: of the set, for the log.
        """
        rank, ranks = self.groups.rank("data"), self.groups.size("data")
        tokens = rows_per_sample(self.args) * (self.args.seq_length + 1)
        step = max(1, _TOKENS_AT_ONCE // tokens) * ranks
        row_names: set[bytes] = set()
        computed, logged_at = 0, time.monotonic()
        for start in range(0, size, step):
            self.watchdog.now("computing reference log-probabilities")
            numbers = range(start + rank, min(start + step, size), ranks)
            rows = run_on_each_rank(self.groups, partial(_rows_by_name, dataset, numbers))
            everyone = self._from_data_ranks(list(rows))
            saved, _ = self.scores.find(rows)
            # The first rank that has a row scores it.
            assigned = {name for names in everyone[:rank] for name in names}
            missing = [
                row
                for (name, row), is_saved in zip(rows.items(), saved, strict=True)
                if not is_saved and name not in assigned
            ]
            row_names.update(*everyone)
            computed += self._add(missing)
            if time.monotonic() - logged_at > _SAY_EVERY:
                self.logger.info(f"reference: scored {min(start + step, size)} of {size} samples of the {name} set")
                logged_at = time.monotonic()
        return computed, len(row_names) - computed

    def _add(self, rows: list[Response]) -> int:
        """Score this rank's `rows` and add them to the cache; return how many rows all ranks scored."""
        counts = self._from_data_ranks(len(rows))
        if not sum(counts):
            return 0
        self.have_weights()
        sums = self._score(rows)
        scored = np.array([(row.name, value, row.count) for row, value in zip(rows, sums, strict=True)], SCORES)
        new = np.concatenate(self._from_data_ranks(scored))
        run_on_each_rank(self.groups, lambda: _check_finite(new))
        on_rank_zero(self.groups, lambda: add_scores(self.folder, self.description, new))
        self.scores = ReferenceScores(np.concatenate([self.scores.rows, new]))
        return sum(counts)

    def _score(self, rows: list[Response]) -> np.ndarray:
        """Returns the summed log-probability of each row, float32. Data ranks may have different numbers of
        rows. Raises StopRequested on all ranks after a stop signal to one."""
        packed, saving = self.args.pack_impl != "unpacked", least_prefix_saving(self.args)
        samples, order = run_on_each_rank(
            self.groups, lambda: pack_responses(rows, self.args.seq_length + 1, packed, saving)
        )
        size = self.args.train_micro_batch_size_per_gpu * rows_per_sample(self.args)
        batches = max(self._from_data_ranks(-(-len(samples) // size)))
        samples += [responses_to_sample([], self.args.seq_length + 1)] * (batches * size - len(samples))
        sums = [torch.zeros(0)]
        at_once = 4 * self.groups.size("pipe") * size  # enough to keep the stages of a pipeline busy
        for start in range(0, len(samples), at_once):
            chunk = samples[start : start + at_once]
            micro_batches = [self.collate(chunk[i : i + size]) for i in range(0, len(chunk), size)]
            sums += [part.cpu() for part in self.engine.scores(micro_batches)]
        scores = np.empty(len(rows), np.float32)
        scores[order] = torch.cat(sums).numpy()
        return scores

    def _from_data_ranks(self, value: object) -> list:
        return run_on_all_ranks_of(self.groups.group("data"), self.groups.size("data"), lambda: value)


def _rows_by_name(dataset: SampleSet, numbers: range) -> dict[bytes, Response]:
    """Returns the distinct rows (answers) of the samples with these numbers, by the hash that names each.

    Raises StopRequested after a stop signal.
    """
    look_for_stop()
    return {row.name: row for number in numbers for row in _rows_of(dataset, number)}


def _rows_of(dataset: SampleSet, number: int) -> list[Response]:
    sample = dataset[number]
    assert isinstance(sample, PreferenceSample)
    return all_responses_of(sample)


def _check_finite(rows: np.ndarray) -> None:
    bad = int((~np.isfinite(rows["sum"])).sum())
    if bad:
        raise DataError(f"reference: the model's log-probabilities of {bad} of {len(rows)} answers are not finite")
