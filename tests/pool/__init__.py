"""Runs a function on N ranks in a fraction of a second.

A server started once per pytest run has torch and DeepSpeed imported; each job gets N fresh forks of it, so
nothing of one job is seen by the next. `run_ranks` is the only call tests need.
"""

from tests.pool.client import run_ranks, start_server, stop_server

__all__ = ["run_ranks", "start_server", "stop_server"]
