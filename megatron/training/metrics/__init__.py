"""Measures metrics of a run (FLOPs, memory, norms, GPU use) and writes them to files and trackers."""
