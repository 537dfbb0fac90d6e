"""Variants of runs: branches of a run, sweeps, a batch trained again in view, and comparisons of results."""
