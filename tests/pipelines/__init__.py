"""Pipelines: their files, gates, sources, promotion, and whole runs with stages that take seconds."""
