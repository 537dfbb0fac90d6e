"""The program of a spare: a process that imports what a rank has imported, waits, and becomes a rank.

`megatron.launch.spares` starts it. A rank tells with `report_imports` what a spare has to import.
"""

import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.process.early_signals import show_stacks_on_signal

IMPORTS = "NEOX_IMPORTS_FILE"
"""The variable that names the file to which a rank writes the modules it has imported."""
# Variables that a rank sets before an import that reads them. Others may be a process's own (WANDB_SERVICE).
_READ_BY_IMPORTS = ("DS_ACCELERATOR",)


def report_imports() -> None:
    """Writes this process's modules and `sys.path` to the file that the launcher asked for, at the first call
    alone. Only the first rank of a machine does so.

    A file that cannot be written is left out: without it a restart only takes longer.
    """
    name = os.environ.pop(IMPORTS, None)
    if name is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    report = {
        "path": sys.path,
        "modules": [module for module in list(sys.modules) if not module.endswith("__main__")],  # those are programs
        "environment": {key: os.environ[key] for key in _READ_BY_IMPORTS if key in os.environ},
    }
    with suppress(OSError):
        partial = Path(f"{name}.tmp")
        partial.write_text(json.dumps(report))
        partial.replace(name)


def wait(script: str, words: Sequence[str], report: Mapping[str, Any], orders: int) -> None:
    """Imports modules, waits for the rank's environment variables, and then runs a script as this rank.

    script, words: the command to run. report: from `report_imports`; `sys.path` is the rank's already.
    orders: a descriptor, from which one line of JSON with the variables comes, or nothing if no rank is
    needed.
    """
    show_stacks_on_signal()
    os.environ.update(report["environment"])
    for module in report["modules"]:
        with suppress(Exception):  # the rank imports again what it needs, and reports what fails
            importlib.import_module(module)
    with open(orders) as file:
        line = file.readline()
    if not line:
        os._exit(0)
    os.environ.update(json.loads(line))
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
