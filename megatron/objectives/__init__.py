"""Objectives: the losses of training, as pure functions from tensors to tensors.

`objective.py` defines `Objective`. This package holds the loss of language modelling and helpers that several
losses share. Other losses are in `megatron/methods/METHOD/objective.py`; to add one, write a function there
and an entry in that method's table of losses. The engine, not the objective, divides a step's loss by its
total weight and runs reference models.
"""

from megatron.objectives.language_modelling import LANGUAGE_MODELLING, language_modelling
from megatron.objectives.objective import ROW_LOSSES, HeadUse, Objective
from megatron.objectives.preference import label_logprobs, response_scores, response_sums
