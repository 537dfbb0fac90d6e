"""`python deepy.py doctor`: finds obstacles to a run on this machine before it starts.

Each check is a small function that returns a `Check`; `command` runs them and prints a table or JSON.
"""

from megatron.launch.doctor.command import main
