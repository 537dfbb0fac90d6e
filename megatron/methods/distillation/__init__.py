"""Distillation: a student model learns to match a teacher model's next-token distributions."""
