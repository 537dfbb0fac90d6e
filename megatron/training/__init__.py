"""Training: engines behind one protocol (DeepSpeed's in a package), optimizers and schedules, checkpoints of
a run, the loop and its callbacks. `start(args, process)` builds all in order; `train(training, callbacks)`
runs it to its end."""

from megatron.training.loop import train
from megatron.training.nonfinite_guard import NonFiniteError
from megatron.training.run import Training
from megatron.training.setup import start
