"""Checkpoints of a run: its starting point, the content of each file, and the check for the same run."""
