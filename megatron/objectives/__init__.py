"""Objectives: the losses of training as pure functions from tensors to tensors.

`objective.py` says what an objective is, `training/method.py` makes that of a configuration. The losses are
in `language_modelling.py`, `distillation.py`, `unlearning.py`, `pair_losses.py` (DPO and its relatives),
`kto.py`, `reward.py` and `reinforcement.py`; a new loss is a function there and a line in the table of
`neox_arguments/keys/losses.py`. Normalising by the weight of the optimizer step, reference models and logging
are the work of engine and loop.
"""

from megatron.objectives.dpo import dpo
from megatron.objectives.kto import KtoSettings, kto
from megatron.objectives.language_modelling import LANGUAGE_MODELLING, language_modelling
from megatron.objectives.objective import HeadUse, Objective, loss_function
from megatron.objectives.pair_losses import PairSettings
from megatron.objectives.preference import label_logprobs, response_sums
from megatron.objectives.reward import response_scores, reward

__all__ = [
    "LANGUAGE_MODELLING",
    "HeadUse",
    "KtoSettings",
    "Objective",
    "PairSettings",
    "response_scores",
    "response_sums",
    "reward",
    "dpo",
    "kto",
    "label_logprobs",
    "language_modelling",
    "loss_function",
]
