"""Experiments: branches, sweeps, batches of past steps, and comparisons of runs."""
