"""Training: engines behind one protocol (DeepSpeed's in a package), optimizers and schedules, checkpoints of a run, the
loop and its callbacks. `start(args, process)` builds all in order; `train(training, callbacks)` runs it to the end."""

from megatron.training.callbacks import Callback, Step
from megatron.training.guards import NonFiniteError
from megatron.training.loop import train
from megatron.training.setup import Training, start

__all__ = ["Callback", "NonFiniteError", "Step", "Training", "start", "train"]
