"""How busy each expert is, on disk: `router_load.jsonl` beside `metrics.jsonl`."""

from collections.abc import Sequence

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.distributed import run_on_each_rank
from megatron.neox_arguments import NeoXArgs
from megatron.process.metrics_file import JsonlLogger
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.metrics.loggers import build_load_file
from megatron.training.run import Training

MOST_LINES = 500


class RouterLoad(Callback):
    """A line every `interval` steps, from rank 0. The load of a step is read when the next one has been
    started, and at a save; other steps cost nothing."""

    def __init__(self, training: Training, file: JsonlLogger, layers: Sequence[int]) -> None:
        """layers: NeoX's indices of the blocks with experts."""
        self._training, self._file, self._layers = training, file, list(layers)
        self._interval = interval(training.args)
        self._pending: tuple[int, HostCopy] | None = None

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Write the line that is on its way, and begin to read the next."""
        self._settle()
        routing = self._training.engine.routing
        if step.result is not None and routing is not None and step.iteration % self._interval == 0:
            self._pending = step.iteration, HostCopy(routing.load.flatten())

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Write what a run that goes on from here would not write again."""
        self._settle()

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Give up what is on its way: it is a sum over ranks, which may never come."""
        self._pending = None

    def close(self) -> None:
        """Write what is left."""
        try:
            self._settle()
        finally:
            self._file.close()

    def _settle(self) -> None:
        if self._pending is None:
            return
        (iteration, reading), self._pending = self._pending, None
        values = [round(value, 3) for value in reading.read()]
        experts = len(values) // len(self._layers)
        load = [values[first : first + experts] for first in range(0, len(values), experts)]
        self._file.write({"iteration": iteration, "layers": self._layers, "load": load})


def interval(args: NeoXArgs) -> int:
    """Steps between two lines: each is a logged one, and a run has no more than about MOST_LINES."""
    return args.log_interval * max(1, -(-args.train_iters // (MOST_LINES * args.log_interval)))


def build_router_load(training: Training) -> list[RouterLoad]:
    """The callback, on rank 0 of a run whose model has experts and that has a folder for the file. All ranks
    together. Raises ConfigError."""
    groups, balance = training.groups, training.engine.stage.balance
    if training.args.moe_num_experts == 1:
        return []

    def build() -> JsonlLogger | None:
        if groups.world_rank > 0:
            return None
        run_id, begun = training.checkpointer.run_id, training.progress.iteration
        return build_load_file(training.args, begun, run_id, training.logger.warning)

    file = run_on_each_rank(groups, build)
    return [RouterLoad(training, file, balance.layers)] if file is not None and balance is not None else []
