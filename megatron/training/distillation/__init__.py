"""Distillation: the teacher beside the model that is trained, and what is kept of it."""
