"""Trains models: `start(args, process)` builds a run, `train(training, callbacks)` runs it to its end.

The package holds the engines (native and DeepSpeed) behind one protocol, optimizers and schedules, the
checkpoints of a run, and the training loop with its callbacks.
"""

from megatron.training.loop import train
from megatron.training.nonfinite_guard import NonFiniteError
from megatron.training.run import Training
from megatron.training.setup import start
