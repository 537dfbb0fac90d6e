"""Callbacks: the classes called beside the steps of a run, and the run's interface to them. Training calls
them; generation and evaluation, which training does not import, have some; `callbacks: [FILE.py:CLASS]`
names a user's."""

from megatron.callbacks.callback import Callback
from megatron.callbacks.run import OnGradients, Parts, RunEngine, Step, StepResult, TrainingRun
