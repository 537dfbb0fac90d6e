"""Objectives: pairs of pure functions, a batch's weight and its summed loss. Normalising by the optimizer step's total
weight is the engine's work; chunking and vocabulary parallelism wrap them. They see tensors and return tensors."""

from megatron.objectives.language_modelling import LANGUAGE_MODELLING, language_modelling
from megatron.objectives.objective import Objective

__all__ = ["LANGUAGE_MODELLING", "Objective", "language_modelling"]
