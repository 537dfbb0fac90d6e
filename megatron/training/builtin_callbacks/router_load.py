"""Writes the load of each expert (its tokens, divided by the mean) to `router_load.jsonl` in the log
folder."""

from collections.abc import Sequence

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.distributed import run_on_each_rank
from megatron.neox_arguments import NeoXArgs
from megatron.process.metrics_file import LOAD_FILE, JsonlLogger
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.metrics.loggers import build_jsonl
from megatron.training.run import Training

MOST_LINES = 500


class RouterLoad(Callback):
    """Writes the load of each expert every `interval` steps, on rank 0. Other steps cost nothing.

    The load of a step is read from the device when the next step has begun, or before a save.
    """

    def __init__(self, training: Training, file: JsonlLogger, layers: Sequence[int]) -> None:
        """layers: layer indices, as in checkpoints, of the blocks with experts."""
        self._training, self._file, self._layers = training, file, list(layers)
        self._interval = interval(training.args)
        self._pending: tuple[int, HostCopy] | None = None

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Write the pending line; if this step is due, begin to copy its expert load to the host."""
        self._settle()
        routing = self._training.engine.routing
        if step.result is not None and routing is not None and step.iteration % self._interval == 0:
            self._pending = step.iteration, HostCopy(routing.load.flatten())

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Write the pending line, because a run that resumes from this checkpoint would not write it
        again."""
        self._settle()

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Drop the pending line: its values are a sum over ranks, which may never arrive after an error."""
        self._pending = None

    def close(self) -> None:
        """Write the pending line and close the file."""
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
        load = [values[start : start + experts] for start in range(0, len(values), experts)]
        self._file.write({"iteration": iteration, "layers": self._layers, "load": load})


def interval(args: NeoXArgs) -> int:
    """Returns the number of steps between two lines of `router_load.jsonl`.

    It is a multiple of `log_interval`, large enough that a run writes at most about `MOST_LINES` lines.
    """
    return args.log_interval * max(1, -(-args.train_iters // (MOST_LINES * args.log_interval)))


def build_router_load(training: Training) -> list[RouterLoad]:
    """Returns [RouterLoad] on rank 0 if the model has experts and a log folder is set, else [].

    All ranks call it together. Raises ConfigError if the file cannot be written.
    """
    groups, balance = training.groups, training.engine.stage.balance
    if training.args.moe_num_experts == 1:
        return []

    def build() -> JsonlLogger | None:
        if groups.world_rank > 0:
            return None
        run_id, start_iteration = training.checkpointer.run_id, training.progress.iteration
        return build_jsonl(training.args, LOAD_FILE, start_iteration, run_id, training.logger.warning)

    file = run_on_each_rank(groups, build)
    return [RouterLoad(training, file, balance.layers)] if file is not None and balance is not None else []
