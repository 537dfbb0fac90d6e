"""Shows samples of a dataset as text, and which tokens are trained: runs inspect_samples.py.

This file has the same name as Python's module `inspect`. When a tool in this folder runs, Python looks for
modules here first. So if a library imports `inspect`, this file loads Python's module in its place.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if __name__ in ("__main__", "inspect"):
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]

if __name__ == "inspect":
    del sys.modules["inspect"]
    import inspect  # noqa: F401  Python's own module, which the importing library then gets
elif __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(_FOLDER)))
    from megatron.process import run_command
    from tools.datasets.inspect_samples import main

    run_command(main)
