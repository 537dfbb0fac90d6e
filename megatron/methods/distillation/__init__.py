"""Distillation: learns from a teacher's distributions."""
