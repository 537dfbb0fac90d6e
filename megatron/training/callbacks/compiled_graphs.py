"""How many graphs torch.compile has made, and a warning where it does not stop making them."""

import torch

from megatron.callbacks import Callback, Step, TrainingRun

_FEW = 4  # a validation, or rows of another length, may need some that no step before has needed


class CompiledGraphs(Callback):
    """`runtime/compiled_graphs`: made by this process; `runtime/recompilations`: of these, after its second
    step."""

    def __init__(self) -> None:
        self._steps, self._expected, self._warned = 0, 0, False

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Count them, on the host; warn once when there are more than a few of the later ones."""
        if step.result is None:
            return
        self._steps += 1
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if self._steps <= 2:
            self._expected = graphs
        later = graphs - self._expected
        if step.iteration % run.args.log_interval == 0:
            step.row["runtime/compiled_graphs"], step.row["runtime/recompilations"] = graphs, later
        if later > _FEW and not self._warned:
            self._warned = True
            run.logger.warning(
                f"torch.compile has made {later} graphs since the second step of this start, each for seconds or "
                f"minutes; the last because {recompile_reason()}. TORCH_LOGS=recompiles shows all"
            )


def recompile_reason() -> str:
    """Why the last graph was made although there was one of the same code, in dynamo's words."""
    reasons = [metrics.recompile_reason for metrics in torch._dynamo.utils.get_compilation_metrics()]
    last = next(filter(None, reversed(reasons)), None)
    return "of code that had none" if last is None else " ".join(last.split())
