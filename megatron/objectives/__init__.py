"""Objectives: the losses of training as pure functions from tensors to tensors.

`objective.py` says what an objective is, `training/method.py` makes that of a configuration. Here are
`language_modelling.py` and what several losses share; others stand in the folders of `megatron/methods`. A
new loss is a function there and a line in the table of its kind's folder. Normalising by the weight of the
optimizer step, reference models and logging are the work of engine and loop.
"""

from megatron.objectives.language_modelling import LANGUAGE_MODELLING, language_modelling
from megatron.objectives.objective import HeadUse, Objective
from megatron.objectives.preference import label_logprobs, response_scores, response_sums
