"""`python deepy.py doctor`: what would stop a run on this machine, found before it is started.

One small function a check, each giving a `Check`; `command` runs them and prints a table or JSON.
"""

from megatron.launch.doctor.command import main

__all__ = ["main"]
