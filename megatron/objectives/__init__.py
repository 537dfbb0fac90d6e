"""Objectives: pure functions from a model's output and a batch to (loss sum, weight sum, per-token values).
Normalising by the optimizer step's total weight is the engine's work, so any split of the step gives the same loss.
Chunking and vocabulary parallelism wrap them; they see tensors and return tensors."""

from megatron.objectives.language_modelling import LossOutput, language_modelling

__all__ = ["LossOutput", "language_modelling"]
