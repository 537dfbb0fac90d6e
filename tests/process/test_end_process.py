"""The end of a process: registered functions run, modules are not destroyed."""

import subprocess
import sys

import pytest

# Stands for the process group whose destruction aborts: an object that is alive until modules are destroyed.
SCRIPT = """
import atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from megatron.process import end_process
class Aborts:
    def __del__(self, abort=os.abort):
        abort()
sys.kept = Aborts()
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
pool = ThreadPoolExecutor(1)
pool.submit(print, "executor").result()
{end}(3)
"""


@pytest.mark.parametrize(("end", "code"), [("end_process", 3), ("sys.exit", -6)])
def test_everything_runs_but_the_clean_up_of_modules(end: str, code: int) -> None:
    """Under `sys.exit` the same process aborts: the script does what it says."""
    script = SCRIPT.format(end=end)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert code < 0 or ended.stdout.split() == ["executor", "thread", "registered"]
