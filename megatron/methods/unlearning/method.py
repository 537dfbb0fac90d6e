"""Unlearning: chooses the dataset of each step, skips steps on the forget set (`ga_dataset`), and counts
them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from megatron.callbacks import Callback, Step, StepResult, TrainingRun
from megatron.data import Batch, Datasets, SampleSet, collation
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample
from megatron.data.preferences.preference_dataset import PreferenceSample
from megatron.data.preferences.responses import Responses, collate_preferences
from megatron.data.run_datasets import WrappedSet
from megatron.data.set_config import masked_token_ids
from megatron.distributed import on_rank_zero
from megatron.methods.language_modelling.method import Method as LanguageModelling
from megatron.methods.unlearning.declaration import retains_by_divergence
from megatron.methods.unlearning.keys import UnlearningKeys
from megatron.methods.unlearning.objective import ForgetSettings, UnlearningBatch, set_of, unlearning
from megatron.methods.unlearning.schedule import ascent_steps, begins_burst, is_ascent, optimizer_steps
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.training.engine import Engine
from megatron.training.method import Collate, Load, LoggedSteps, MethodRun, StepData

AVERAGE = 0.9  # weight of the earlier average in the moving average of ga_threshold_check_mode: ema


@dataclass(frozen=True)
class UnlearningProgress:
    """The progress of a run on its forget set; checkpoints save it.

    samples: samples read of the forget set, and as many of the retain set; those of skipped steps count too.
    steps, left_out: numbers of steps on the forget set that were taken, and skipped by `ga_loss_threshold`.
    burst_left_out: the current burst of steps is skipped.
    last_loss: loss of the last step on the forget set; None if unknown.
    average_loss: moving average of these losses; None if unknown.
    """

    samples: int = 0
    steps: int = 0
    left_out: int = 0
    burst_left_out: bool = False
    last_loss: float | None = None
    average_loss: float | None = None


class Method(LanguageModelling):
    """Unlearning: some steps train on the forget set, and maybe the retain set; the others predict the next
    token."""

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of unlearning runs."""
        keys = UnlearningKeys.read_from(args)
        return unlearning(
            super().objective(args),
            forget_loss=keys.ga_loss_type,
            settings=ForgetSettings(keys.npo_beta, keys.simnpo_beta, keys.simnpo_gamma),
            retain_weight=keys.gd_retain_weight,
            retain_divergence=retains_by_divergence(args),
            separate_losses=keys.gd_mode and keys.gd_log_separate_losses,
            columns=args.softmax_rows,
        )

    def num_steps(self, args: NeoXArgs, iterations: int, log: Callable[[str], None]) -> int:
        """Returns the number of optimizer steps in `iterations` of `train_iters`, which counts a burst as one
        iteration.

        log: called with a line if the two numbers differ.
        """
        keys = UnlearningKeys.read_from(args)
        steps = optimizer_steps(keys, iterations)
        if steps != iterations:
            bursts = f"{iterations} iterations with bursts of {keys.ga_iters} steps on ga_dataset"
            log(f"ga_mode: interval: {bursts} make {steps} optimizer steps")
        return steps

    def num_training_steps(self, args: NeoXArgs, start: int, end: int) -> int:
        """Returns how many of the steps [start, end), counted from 0, read the training set, not the forget
        set."""
        ascents = ascent_steps(UnlearningKeys.read_from(args), start, end)
        return super().num_training_steps(args, start, end) - ascents

    def wrap_datasets(self, args: NeoXArgs, datasets: Datasets, eod: int | None) -> Datasets:
        """Returns the datasets; in the forget set a sample holds full sequences if its loss scores sequences
        (npo, simnpo)."""
        forget = datasets.further.get("forget")
        if UnlearningKeys.read_from(args).ga_loss_type == "nll" or forget is None:
            return datasets
        sequences = SequenceDataset(
            forget,
            separate_documents=args.reset_attention_mask,
            eod=eod,
            mask_after_eod=args.eod_mask_loss,
            masked_ids=masked_token_ids(args),
        )
        return datasets.with_sets({"forget": sequences})

    sets_with_responses = ("forget",)

    def response_collation(self, args: NeoXArgs) -> Collate:
        """Returns the collate function for samples of the forget set as sequences to score."""
        return partial(collate_preferences, packed=args.reset_attention_mask)

    def steps(self, run: MethodRun, load: Load) -> Iterator[StepData]:
        """Yields the data of each step: of the training set, or of the forget set followed by the retain set.

        The run's progress decides which, when the step is requested. A step on the forget set whose loss is
        above `ga_loss_threshold` is skipped and counted in the progress; an ordinary step takes its place.
        """
        args, sets, samples = run.args, run.datasets.further, run.progress.method_state.samples
        ordinary, eod, num_workers = super().steps(run, load), run.tokenizer.eod, min(run.args.num_workers, 1)
        if "forget" not in sets:  # none of the steps left trains on it
            return ordinary
        forget = load(sets["forget"], samples, _collation(args, eod, "forget"), num_workers)
        retain = None
        if "retain" in sets:
            retain = load(sets["retain"], samples, _collation(args, eod, "retain"), num_workers)
        return _steps(run, ordinary, forget, retain)

    def after_step(self, run: MethodRun, data: StepData, result: StepResult) -> None:
        """Counts a step on the forget set in the run's progress, and notes its loss if the next step depends
        on it."""
        if data.role == "forget":
            run.progress.method_state = after_ascent(run.args, run.progress.method_state, result)

    def callbacks(self, run: MethodRun) -> Sequence[Callback]:
        """Returns the callback that logs counts of steps on the forget set."""
        return [UnlearningCallback(run)]

    def mean_loss(self, trained: Sequence[tuple[str, float]]) -> float:
        """Returns the mean loss of ordinary steps; if there are none, of steps on the forget set, whose
        losses are negative.

        trained: (role, loss) of each step that was not skipped.
        """
        return super().mean_loss([pair for pair in trained if pair[0] != "forget"] or trained)

    def row(self, args: NeoXArgs, steps: LoggedSteps) -> Mapping[str, float]:
        """Returns metrics of the logged steps, with the names of the geodesic fork of GPT-NeoX.

        train/batch_type: share of steps on the forget set. train/ga_lr_scaled: learning rate of the last of
        these steps. train/gd_combined_loss: with `gd_mode`, mean loss of these steps, without skipped ones.
        """
        keys, roles = UnlearningKeys.read_from(args), steps.roles
        row = {"train/batch_type": roles.count("forget") / len(roles)}
        if "forget" in roles:
            last = steps.iteration - roles[::-1].index("forget")
            row["train/ga_lr_scaled"] = steps.schedule(last - 1) * keys.ga_lr_scale
        losses = [loss for role, loss in steps.trained if role == "forget"]
        if keys.gd_mode and losses:
            row["train/gd_combined_loss"] = sum(losses) / len(losses)
        return row

    def initial_state(self) -> UnlearningProgress:
        """Returns the progress of a new run, with all counts 0."""
        return UnlearningProgress()

    def save_state(self, state: UnlearningProgress) -> Mapping[str, Any]:
        """Returns the progress as entries for the checkpoint's model file."""
        return {"unlearning": asdict(state)}

    def load_state(self, saved: Mapping[str, Any]) -> UnlearningProgress:
        """Returns the progress that a checkpoint's model file holds; that of a new run if it holds none."""
        return UnlearningProgress(**saved.get("unlearning", {}))

    def further_samples(self, record: Mapping[str, Any]) -> int:
        """Returns the number of samples read of the forget set (and of the retain set), as the manifest
        records it."""
        return record.get("forget_samples", 0)

    def data_record(self, state: UnlearningProgress) -> Mapping[str, Any]:
        """Returns the number of samples read of the forget set, for the checkpoint's manifest."""
        return {"forget_samples": state.samples}


class SequenceDataset(WrappedSet):
    """Turns each row of `dataset` into a `PreferenceSample` whose responses are the sequences to score.

    separate_documents: each document of the row is a sequence, as with `reset_attention_mask`; else the row
        is one sequence.
    eod: id of the end-of-document token. In data without label files it also ends a document.
    mask_after_eod: the token after `eod` is not trained (`eod_mask_loss`).
    masked_ids: token ids that are never trained as labels.
    """

    def __init__(
        self,
        dataset: SampleSet,
        *,
        separate_documents: bool,
        eod: int | None,
        mask_after_eod: bool,
        masked_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__(dataset)
        self.separate_documents, self.eod = separate_documents, eod
        self.mask_after_eod, self.masked_ids = mask_after_eod, masked_ids

    def __getitem__(self, index: int) -> PreferenceSample:
        row = self.dataset[index]
        labels, begins = row.labels.copy(), row.begins.copy()
        if self.masked_ids:
            labels[np.isin(labels, self.masked_ids)] = MASKED
        filled = len(row.tokens) if row.filled is None else row.filled
        if self.eod is not None:
            follows = np.zeros_like(begins)
            follows[1:] = row.tokens[:-1] == self.eod
            if self.mask_after_eod:
                labels[follows] = MASKED
            if not row.labelled:
                begins |= follows
        numbers = np.cumsum(begins) - 1 if self.separate_documents else np.zeros(len(begins), np.int64)
        numbers[filled:] = -1
        count = int(numbers.max()) + 1
        sample = TokenSample(row.tokens, labels, begins, True, None, filled)
        return PreferenceSample((sample,), (numbers,), np.ones(count, np.float32))


def _steps(
    run: MethodRun, ordinary: Iterator[StepData], forget: Iterator[list[Batch]], retain: Iterator[list[Batch]] | None
) -> Iterator[StepData]:
    keys = UnlearningKeys.read_from(run.args)
    while True:
        if is_ascent(keys, run.progress.iteration):
            batches = [next(forget) + (next(retain) if retain is not None else [])]
            if not _left_out(run, batches[0]):
                yield StepData(batches.pop(), "forget", keys.ga_lr_scale, False, 1 if retain is None else 2)
                continue
            batches.clear()
        yield next(ordinary)


def _collation(args: NeoXArgs, eod: int | None, name: Literal["forget", "retain"]) -> Collate:
    """Returns the collate function of the forget set or of the retain set. name: which of the two."""
    keys = UnlearningKeys.read_from(args)
    is_scored = name == "forget" and keys.ga_loss_type != "nll"
    collate = Method().response_collation(args) if is_scored else collation(args, eod)
    return partial(_marked, collate, name)


def _marked(collate: Collate, name: Literal["forget", "retain"], *samples: Any, **options: Any) -> Batch:
    batch = collate(*samples, **options)
    responses = batch.method if isinstance(batch.method, Responses) else None
    return replace(batch, method=UnlearningBatch(name, responses))


def _left_out(run: MethodRun, batches: list[Batch]) -> bool:
    """Decides whether to skip the step on these batches, and records the decision in the run's progress.

    A step is skipped if its loss is above `ga_loss_threshold`. All ranks must call it together.
    """
    keys = UnlearningKeys.read_from(run.args)
    args, progress, engine = run.args, run.progress, run.engine
    if keys.ga_loss_threshold is None:
        return False
    previous: UnlearningProgress = progress.method_state
    in_burst = not begins_burst(keys, progress.iteration) and keys.ga_threshold_check_mode == "per_burst"
    leave_out, now = previous.burst_left_out, previous
    if not in_burst:
        loss = previous.average_loss if keys.ga_threshold_check_mode == "ema" else previous.last_loss
        if loss is None or not keys.ga_threshold_skip_forward:
            now = noted_loss(previous, _mean_loss(engine, batches))
            loss = now.average_loss if keys.ga_threshold_check_mode == "ema" else now.last_loss
        is_above = loss is not None and loss > keys.ga_loss_threshold
        leave_out = on_rank_zero(engine.groups, lambda: is_above)  # the loss may differ between ranks in last bits
    if leave_out:
        if keys.ga_threshold_skip_forward:  # ordinary steps will change the loss: measure it before the next step
            now = replace(now, last_loss=None, average_loss=None)
        samples = now.samples + args.train_batch_size
        now = replace(now, samples=samples, left_out=now.left_out + 1)
    progress.method_state = replace(now, burst_left_out=leave_out)
    return leave_out


def _mean_loss(engine: Engine, batches: list[Batch]) -> float:
    """Returns the mean negative log-likelihood of the forget set's tokens in these batches, over all data
    ranks.

    Computed without gradients. NaN if no token is trained.
    """
    batches = [batch for batch in batches if set_of(batch) == "forget"]
    sums = torch.zeros(2, dtype=torch.float64)
    for batch, logprobs in zip(batches, engine.token_logprobs(batches), strict=True):
        weights = batch.loss_weights.double()
        sums += torch.stack([-(logprobs.double().cpu() * weights.cpu()).sum(), weights.cpu().sum()])
    total, count = engine.groups.sum(sums.to(engine.groups.device), "data").tolist()
    return total / count if count else math.nan


def noted_loss(progress: UnlearningProgress, loss: float) -> UnlearningProgress:
    """Returns `progress` with `last_loss` and the moving average updated by the loss of a step on the forget
    set.

    A loss that is not finite changes nothing.
    """
    if not math.isfinite(loss):
        return progress
    average = loss if progress.average_loss is None else AVERAGE * progress.average_loss + (1 - AVERAGE) * loss
    return replace(progress, last_loss=loss, average_loss=average)


def after_ascent(args: NeoXArgs, progress: UnlearningProgress, result: StepResult) -> UnlearningProgress:
    """Returns `progress` after a step on the forget set: counts raised, and its loss noted if needed.

    The loss is needed, and waits for the GPU, only if it decides on the next step
    (`ga_threshold_skip_forward`).
    """
    keys = UnlearningKeys.read_from(args)
    progress = replace(progress, samples=progress.samples + args.train_batch_size, steps=progress.steps + 1)
    if keys.ga_loss_threshold is not None and keys.ga_threshold_skip_forward:
        return noted_loss(progress, float(result.metrics["ga_actual_loss"]))
    return progress


class UnlearningCallback(Callback):
    """Adds counts of steps on the forget set to each step's metrics, with the names of the geodesic fork of
    GPT-NeoX."""

    def __init__(self, training: MethodRun) -> None:
        self.training = training

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Adds the metrics train/ga_iterations (steps taken) and train/ga_skip_rate (share of steps
        skipped)."""
        if step.result is None:
            return
        now: UnlearningProgress = self.training.progress.method_state
        step.row["train/ga_iterations"] = now.steps
        step.row["train/ga_skip_rate"] = now.left_out / max(1, now.steps + now.left_out)
