"""Defines the interface of a training method, such as DPO or GRPO: the parts of a run that it changes.

The defaults of the base class are those of next-token prediction on the training set. The loop, the log and
checkpoints call the run's method and know no method by name. `neox_arguments/methods.py` lists the methods.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.callbacks import Callback, StepResult, TrainingRun
from megatron.data import Batch, Datasets, SampleSet, collation
from megatron.distributed import Watchdog
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.methods import method_module, method_name
from megatron.objectives import Objective
from megatron.tokenizer import Tokenizer, with_vocabulary
from megatron.training.checkpoint.run_parts import MethodState, RunParts, TrainingProgress
from megatron.training.checkpoint.source import mask_padding
from megatron.training.engine import Engine

Collate = Callable[..., Batch]
"""A function that takes samples, a row length and `seed`, and returns one Batch."""


class MethodRun(TrainingRun, Protocol):
    """The part of a run that its `Method` may use."""

    @property
    def engine(self) -> Engine:
        """The engine that trains the model."""

    @property
    def datasets(self) -> Datasets:
        """The run's datasets, as `Method.finish_datasets` returned them."""

    @property
    def progress(self) -> TrainingProgress:
        """The run's counters (iteration, samples, tokens). The method may replace its `method_state`."""

    @property
    def run_id(self) -> str:
        """The name of the run in its logs and checkpoints."""


class Load(Protocol):
    """A function that reads a dataset and yields, for each step, the list of this rank's micro-batches."""

    def __call__(
        self, dataset: SampleSet, consumed: int, collate: Collate | None = None, num_workers: int | None = None
    ) -> Iterator[list[Batch]]:
        """Yields the micro-batches of each step.

        consumed: number of samples that earlier steps have read.
        collate: makes the batches; None: the default.
        num_workers: number of loader processes; None: as configured.
        """


@dataclass
class StepData:
    """This rank's micro-batches of a step, and facts about them that the training loop needs.

    role: a name for the step's data, for callbacks and the log.
    lr_factor: multiplies the learning rate.
    reads_training_set: whether the step consumes a batch of the training set.
    num_sets: number of datasets that the step reads; it reads as many samples of each as the batch has.
    row_length: tokens in a row; None: as configured.
    """

    batches: list[Batch]
    role: str = "train"
    lr_factor: float = 1.0
    reads_training_set: bool = True
    num_sets: int = 1
    row_length: int | None = None

    def take(self) -> list[Batch]:
        """Returns the micro-batches and drops them, so that the engine alone holds what it moves to the
        device."""
        batches, self.batches = self.batches, []
        return batches


@dataclass(frozen=True)
class LoggedSteps:
    """The steps that one row of metrics summarises: all since the previous row.

    iteration: of the last of these steps. roles: `StepData.role` of each step. trained: (role, loss) of each
    step that was not skipped. schedule: takes an iteration, returns its learning rate.
    """

    iteration: int
    roles: Sequence[str]
    trained: Sequence[tuple[str, float]]
    schedule: Callable[[int], float]


class Method(MethodState):
    """The base class of training methods, such as DPO or GRPO. One instance serves one run.

    All ranks call its methods together. Its state is in `TrainingProgress.method_state`, which checkpoints
    save. That value is replaced and never changed in place, so that a failed step can be undone.
    """

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the objective (losses and metrics) of a run. It must depend on `args` alone, because it is
        also called on instances that serve no run."""
        raise NotImplementedError

    # -- before the first step -------------------------------------------------------------------------------

    def with_vocabulary(
        self, args: NeoXArgs, tokenizer: Tokenizer, groups: ParallelGroups, real_rows: int | None
    ) -> NeoXArgs:
        """Returns the configuration with the size of the vocabulary resolved.

        real_rows: number of vocabulary rows that stand for tokens, read from the checkpoint; None if unknown.
        """
        return mask_padding(with_vocabulary(args, tokenizer), real_rows, tokenizer.vocab_size)

    def num_steps(self, args: NeoXArgs, iterations: int, log: Callable[[str], None]) -> int:
        """Returns the number of optimizer steps that `iterations` of `train_iters` take: by default as many.

        log: takes one line if the number differs.
        """
        return iterations

    def num_training_steps(self, args: NeoXArgs, start: int, end: int) -> int:
        """Returns how many of the steps [start, end), counted from 0, read the training set."""
        return max(0, end - start)

    def wrap_datasets(self, args: NeoXArgs, datasets: Datasets, eod: int | None) -> Datasets:
        """Returns the datasets, wrapped so that they yield the samples on which this method trains.

        eod: the tokenizer's end-of-document token.
        """
        return datasets

    def finish_datasets(self, parts: RunParts, datasets: Datasets, watchdog: Watchdog) -> Datasets:
        """Returns the datasets that the run will read. Called once the run's checkpoint is loaded.

        A method also sets up its further models here, such as a teacher.
        """
        return datasets

    def collation(self, args: NeoXArgs, eod: int | None) -> Collate | None:
        """Returns the function that makes batches of training samples; None: that of
        `megatron.data.collation`."""
        return None

    sets_with_responses: Sequence[str] = ("train", "valid", "test")
    """The fields of `Datasets` whose samples are answers that a reference model may score."""

    def response_collation(self, args: NeoXArgs) -> Collate:
        """Returns the function that makes batches with `Responses` from samples of `sets_with_responses`."""
        return collation(args, None)

    def begin(self, run: MethodRun) -> None:
        """Start what generates the samples of steps, such as rollouts. Called before the first step, if steps
        are left."""

    def callbacks(self, run: MethodRun) -> Sequence[Callback]:
        """Returns the method's own callbacks. The run calls them after validation and before it writes the
        row of metrics."""
        return ()

    def close(self) -> None:
        """Stop what `begin` has started. Called once the run is over, however it ended."""

    # -- steps -----------------------------------------------------------------------------------------------

    def steps(self, run: MethodRun, load: Load) -> Iterator[StepData]:
        """Yields the data of each step that is left. load: yields a dataset's micro-batches step by step."""
        assert run.datasets.train is not None
        steps = load(run.datasets.train, run.consumed_samples, self.collation(run.args, run.tokenizer.eod))
        return map(StepData, steps)

    def after_step(self, run: MethodRun, data: StepData, result: StepResult) -> None:
        """Update `TrainingProgress.method_state` after a step, before `progress.iteration` counts it."""

    # -- metrics ---------------------------------------------------------------------------------------------

    def mean_loss(self, trained: Sequence[tuple[str, float]]) -> float:
        """Returns the loss for a row of metrics: by default the mean; NaN without steps.

        trained: (role, loss) of each step since the previous row that was not skipped.
        """
        return sum(loss for _, loss in trained) / len(trained) if trained else float("nan")

    def row(self, args: NeoXArgs, steps: LoggedSteps) -> Mapping[str, float]:
        """Returns additional metrics, by name, for the row of metrics that summarises `steps`."""
        return {}

    def untrained_reason(self) -> str:
        """Returns the reason, for the log, why a step may have no trained token."""
        return "labels mask all of them"


def find_method(args: ModelArgs) -> Method:
    """Returns a new instance of the training method that the configuration selects."""
    module = method_module(method_name(args), "method")
    assert module is not None
    return module.Method()


def build_objective(args: NeoXArgs) -> Objective:
    """Returns the objective (losses and metrics) of the training method that the configuration selects."""
    return find_method(args).objective(args)
