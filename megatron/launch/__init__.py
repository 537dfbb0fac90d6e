"""Processes: who this process is, and how the ranks of a run are started on this machine.

`process_info` reads rank and world from the environment; `launch_local` starts a command's ranks, watches them and
starts them again; `show_stacks_on_signal` lets the launcher ask a rank where it is.
"""

from megatron.launch.environment import LaunchError, ProcessInfo, enter, process_info
from megatron.launch.local import LocalRun, launch_local, plan_local, run_local
from megatron.launch.stacks import show_stacks_on_signal
from megatron.launch.watch import Outcome

__all__ = [
    "LaunchError",
    "LocalRun",
    "Outcome",
    "ProcessInfo",
    "enter",
    "launch_local",
    "plan_local",
    "process_info",
    "run_local",
    "show_stacks_on_signal",
]
