"""Callbacks: classes with methods that training calls at steps, validations, saves and errors.

This package defines their base class and the interface of the run that they get. Concrete callbacks are in
the packages training, generation and evaluation; users add their own with the key `callbacks:
[FILE.py:CLASS]`.
"""

from megatron.callbacks.callback import Callback
from megatron.callbacks.run import OnGradients, Parts, RunEngine, Step, StepResult, TrainingRun
