"""Checkpoints of a run: where it starts from, what goes into which file, and whether it is the same run."""
