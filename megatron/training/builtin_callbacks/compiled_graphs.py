"""Counts the graphs of torch.compile, and warns if it keeps making new ones."""

import torch

from megatron.callbacks import Callback, Step, TrainingRun

_EXPECTED_RECOMPILATIONS = 4  # a validation, or rows of another length, may need some that no step before has needed


class CompiledGraphs(Callback):
    """Logs two counts of this process: `runtime/compiled_graphs`, and `runtime/recompilations` after the
    second step."""

    def __init__(self) -> None:
        self._steps, self._expected, self._warned = 0, 0, False

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Count the graphs, on the host; warn once after more recompilations than expected."""
        if step.result is None:
            return
        self._steps += 1
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if self._steps <= 2:
            self._expected = graphs
        recompilations = graphs - self._expected
        if step.iteration % run.args.log_interval == 0:
            step.row["runtime/compiled_graphs"], step.row["runtime/recompilations"] = graphs, recompilations
        if recompilations > _EXPECTED_RECOMPILATIONS and not self._warned:
            self._warned = True
            run.logger.warning(
                f"torch.compile has made {recompilations} graphs since the second step of this start, each for "
                f"seconds or minutes; the last because {recompile_reason()}. TORCH_LOGS=recompiles shows all"
            )


def recompile_reason() -> str:
    """Returns dynamo's reason for the last recompilation, on one line.

    If no code was recompiled, it says that the graph is of new code.
    """
    reasons = [metrics.recompile_reason for metrics in torch._dynamo.utils.get_compilation_metrics()]
    last = next(filter(None, reversed(reasons)), None)
    return "of code that had none" if last is None else " ".join(last.split())
