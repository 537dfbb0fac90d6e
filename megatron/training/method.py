"""The interface of a kind of training (`neox_arguments/methods.py`): what it changes in a run.

The base class is next-token prediction on the training set. The loop, the log and checkpoints ask the run's
method, and know no kind of training by name.
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
"""Makes a batch of samples; takes the samples, a length and `seed`."""


class MethodRun(TrainingRun, Protocol):
    """A run as its method sees it."""

    @property
    def engine(self) -> Engine:
        """The model under training."""

    @property
    def datasets(self) -> Datasets:
        """The sets, as `Method.finish_datasets` has returned them."""

    @property
    def progress(self) -> TrainingProgress:
        """How far the run is. A method replaces its `method_state`."""

    @property
    def run_id(self) -> str:
        """The name of the run in its logs and checkpoints."""


class Load(Protocol):
    """Loads this rank's micro-batches of each step of a set."""

    def __call__(
        self, dataset: SampleSet, consumed: int, collate: Collate | None = None, num_workers: int | None = None
    ) -> Iterator[list[Batch]]:
        """consumed: samples that earlier steps have read. collate: None: the run's. num_workers: None: the
        configuration's."""


@dataclass
class StepData:
    """This rank's micro-batches of a step, and what the loop must know of them.

    role: names the data of the step, for callbacks and the log.
    lr_factor: multiplies the learning rate.
    reads_training_set: whether the step consumes a batch of the training set.
    num_sets: number of sets of which the step reads a sample for each sample of the batch.
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
    """The steps since the last row of metrics.

    iteration: of the last one. roles: of each step. trained: (role, loss) of each step that was not skipped.
    schedule: the learning rate of each step.
    """

    iteration: int
    roles: Sequence[str]
    trained: Sequence[tuple[str, float]]
    schedule: Callable[[int], float]


class Method(MethodState):
    """One kind of training. One instance serves one run; all ranks call its methods together.

    state: what a checkpoint keeps of it, in `TrainingProgress.method_state`; the value is never changed, only
    replaced, so that a step that failed can be taken back.
    """

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the losses and metrics of a run. It may be asked of another instance than the run's."""
        raise NotImplementedError

    # -- before the first step -------------------------------------------------------------------------------

    def with_vocabulary(
        self, args: NeoXArgs, tokenizer: Tokenizer, groups: ParallelGroups, real_rows: int | None
    ) -> NeoXArgs:
        """Returns the configuration with the size of the vocabulary resolved.

        real_rows: as `source.real_rows` returns it.
        """
        return mask_padding(with_vocabulary(args, tokenizer), real_rows, tokenizer.vocab_size)

    def num_steps(self, args: NeoXArgs, iterations: int, log: Callable[[str], None]) -> int:
        """Returns the number of optimizer steps in `iterations` of `train_iters`. log: for a note on it."""
        return iterations

    def num_training_steps(self, args: NeoXArgs, start: int, end: int) -> int:
        """Returns how many of the steps [start, end), counted from 0, read the training set."""
        return max(0, end - start)

    def wrap_datasets(self, args: NeoXArgs, datasets: Datasets, eod: int | None) -> Datasets:
        """Returns the sets with the samples that the method reads. eod: the tokenizer's end of a document."""
        return datasets

    def finish_datasets(self, parts: RunParts, datasets: Datasets, watchdog: Watchdog) -> Datasets:
        """Returns the sets as the run reads them, once its checkpoint is loaded; sets up further models."""
        return datasets

    def collation(self, args: NeoXArgs, eod: int | None) -> Collate | None:
        """Returns the collate function of the training set; None: `megatron.data.collation`."""
        return None

    sets_with_responses: Sequence[str] = ("train", "valid", "test")
    """The fields of `Datasets` whose samples are answers that a reference model may score."""

    def response_collation(self, args: NeoXArgs) -> Collate:
        """Returns the collate function of such samples, to batches with `Responses`."""
        return collation(args, None)

    def begin(self, run: MethodRun) -> None:
        """Prepare what writes the steps' samples. Called before the first step, if one is left."""

    def callbacks(self, run: MethodRun) -> Sequence[Callback]:
        """Returns callbacks of the run. They are called after validation, before the row of metrics is
        written."""
        return ()

    def close(self) -> None:
        """End what `begin` has started. Called once the run is over, however it ended."""

    # -- steps -----------------------------------------------------------------------------------------------

    def steps(self, run: MethodRun, load: Load) -> Iterator[StepData]:
        """Yields the steps still to do."""
        assert run.datasets.train is not None
        steps = load(run.datasets.train, run.consumed_samples, self.collation(run.args, run.tokenizer.eod))
        return map(StepData, steps)

    def after_step(self, run: MethodRun, data: StepData, result: StepResult) -> None:
        """Note a step in `TrainingProgress.method_state`. Called before the progress counts it."""

    # -- metrics ---------------------------------------------------------------------------------------------

    def mean_loss(self, trained: Sequence[tuple[str, float]]) -> float:
        """Returns the loss of a row of metrics; NaN without steps. trained: as of `LoggedSteps`."""
        return sum(loss for _, loss in trained) / len(trained) if trained else float("nan")

    def row(self, args: NeoXArgs, steps: LoggedSteps) -> Mapping[str, float]:
        """Returns further values of a row of metrics."""
        return {}

    def untrained_reason(self) -> str:
        """Returns why a step may have no trained token, for the log."""
        return "labels mask all of them"


def find_method(args: ModelArgs) -> Method:
    """Returns the method of a run."""
    module = method_module(method_name(args), "method")
    assert module is not None
    return module.Method()


def build_objective(args: NeoXArgs) -> Objective:
    """Returns the losses and metrics of a run."""
    return find_method(args).objective(args)
