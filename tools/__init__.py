"""Command-line tools for checkpoints, datasets, jobs, documentation and lint, and helpers that they share."""
