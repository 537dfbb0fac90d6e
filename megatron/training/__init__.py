"""Training: engines behind one protocol (DeepSpeed's in a package), optimizers and schedules, checkpoints of a run, the
loop and its callbacks. `start(args, process)` builds all in order; `train(training, callbacks)` runs it to the end."""

from megatron.training.callbacks.step_end import Callback, Step
from megatron.training.loop import train
from megatron.training.nonfinite_guard import NonFiniteError
from megatron.training.setup import Training, start

__all__ = ["Callback", "NonFiniteError", "Step", "Training", "start", "train"]
