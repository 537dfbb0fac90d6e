"""Stacks of a rank on demand."""

import faulthandler
import signal

STACKS_SIGNAL = signal.SIGUSR2
STDERR = 2


def show_stacks_on_signal() -> None:
    """From now on SIGUSR2, and a crash in compiled code, write the Python stacks of all threads to stderr: also while
    this process waits in compiled code, as in a collective."""
    faulthandler.enable(file=STDERR)
    faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True)
