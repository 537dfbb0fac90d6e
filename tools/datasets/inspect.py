"""Show what a dataset teaches, as text: see inspect_samples.py, or --help.

This file has the name of a module of the standard library, and when a tool of this folder runs, Python looks
here first. If a library then imports `inspect`, this file hands it the module of the standard library.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if __name__ in ("__main__", "inspect"):
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]

if __name__ == "inspect":
    del sys.modules["inspect"]
    import inspect  # noqa: F401  the standard library's, which the import system now hands on
elif __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(_FOLDER)))
    from megatron.process import run_command
    from tools.datasets.inspect_samples import main

    run_command(main)
