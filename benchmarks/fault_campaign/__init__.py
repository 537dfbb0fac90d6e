"""The parts of benchmarks/faults.py: runs and their results, faults, processes, and the verdict of a case."""
