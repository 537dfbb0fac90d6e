"""`python deepy.py doctor`: finds obstacles to a run on this machine before it starts.

One small function a check, each giving a `Check`; `command` runs them and prints a table or JSON.
"""

from megatron.launch.doctor.command import main
