"""What every process of a run does first, and how it writes what is only read by people.

`begin_process` comes before anything slow is imported; `LogFile` and `say` never decide the fate of a run. This room
imports nothing but a few modules that Python itself has loaded.
"""

from megatron.process.early_signals import begin_process, exit_code, take_early
from megatron.process.logfile import LogFile, say

__all__ = ["LogFile", "begin_process", "exit_code", "say", "take_early"]
