"""Objectives: pure functions, a batch's weight and its summed loss. Normalising by the optimizer step's total weight,
reference models and logging are the engine's and the loop's work; they see tensors and return tensors."""

from megatron.objectives.build import build_objective
from megatron.objectives.dpo import dpo
from megatron.objectives.kto import KtoSettings, kto
from megatron.objectives.language_modelling import LANGUAGE_MODELLING, language_modelling
from megatron.objectives.objective import Objective, loss_function
from megatron.objectives.pair_losses import PairSettings
from megatron.objectives.preference import answer_sums, label_logprobs

__all__ = [
    "LANGUAGE_MODELLING",
    "KtoSettings",
    "Objective",
    "PairSettings",
    "answer_sums",
    "build_objective",
    "dpo",
    "kto",
    "label_logprobs",
    "language_modelling",
    "loss_function",
]
