"""Runs a function on N ranks in a fraction of a second; `run_ranks` is the only call tests need.

A server that has torch and DeepSpeed imported gives each job fresh forks, so nothing is seen by the next.
"""

from tests.pool.client import run_ranks, start_server, stop_server

__all__ = ["run_ranks", "start_server", "stop_server"]
