"""Implements the DeepSpeed engine. Only this package uses DeepSpeed's objects and configuration."""
