"""Starts and ends the processes of a run, and handles their signals, streams, logs and status files.

Call `begin_process` before slow imports and `end_process` last. `show_stacks_on_signal` lets a launcher see
what a rank is doing. Long work calls `look_for_stop` between its batches. `run_command` ends a command if the
reader of its output has gone; a training run calls `outlive_readers` and continues. `LogFile` and `say` do
not raise if a log cannot be written.

Importing this package is fast: it imports only a few modules of the standard library.
"""

from megatron.process.commands import outlive_readers, run_command
from megatron.process.early_signals import (
    STACKS_SIGNAL,
    begin_process,
    end_process,
    exit_code,
    show_stacks_on_signal,
    take_early_signals,
)
from megatron.process.logfile import LogFile, say
from megatron.process.stop_signals import StopRequested, capture_stop_signals, look_for_stop, stop_reason, stop_signal
