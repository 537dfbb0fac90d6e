"""Processes: who this process is, and how the ranks of a run are started on this machine.

`process_info` reads rank and world from the environment; `launch_local` starts a command's ranks and watches them.
"""

from megatron.launch.environment import LaunchError, ProcessInfo, process_info
from megatron.launch.local import LocalRun, launch_local, plan_local, run_local

__all__ = ["LaunchError", "LocalRun", "ProcessInfo", "launch_local", "plan_local", "process_info", "run_local"]
