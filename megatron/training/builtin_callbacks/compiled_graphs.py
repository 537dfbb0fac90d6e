"""Counts the graphs that torch.compile makes, and warns if it keeps making new ones."""

import torch

from megatron.callbacks import Callback, Step, TrainingRun

_EXPECTED_RECOMPILATIONS = 4  # a validation, or the first row of another length, may need new graphs


class CompiledGraphs(Callback):
    """Logs `runtime/compiled_graphs`, the number of graphs that torch.compile has made in this process, and
    `runtime/recompilations`, how many of them after the second step."""

    def __init__(self) -> None:
        self._steps, self._expected, self._warned = 0, 0, False

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Count torch.compile's graphs; warn once if there are more recompilations than expected."""
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
                f"torch.compile has made {recompilations} more graphs since the second step of this start, which took "
                f"seconds or minutes each; the last one because {recompile_reason()}. To see all reasons, set "
                "TORCH_LOGS=recompiles"
            )


def recompile_reason() -> str:
    """Returns dynamo's reason for the last recompilation, on one line, worded to follow "because".

    If no code was recompiled, the reason is that new code was compiled.
    """
    reasons = [metrics.recompile_reason for metrics in torch._dynamo.utils.get_compilation_metrics()]
    last = next(filter(None, reversed(reasons)), None)
    return "new code was compiled" if last is None else " ".join(last.split())
