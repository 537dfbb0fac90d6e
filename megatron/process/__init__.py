"""Begins and ends every process of a run: its signals, streams, logs and status files.

`begin_process` comes before anything slow is imported, `end_process` last; `show_stacks_on_signal` lets a
launcher ask a rank where it is; `look_for_stop` is called between the batches of whatever takes long.
`run_command` around a command ends it when nobody reads what it writes; a run goes on (`outlive_readers`).
`LogFile` and `say` never raise: a log that cannot be written ends no run.
This package imports nothing but a few modules that Python itself has loaded.
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
