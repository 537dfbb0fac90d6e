"""The program of a spare: a process that imports what a rank has imported, waits, and becomes a rank.

`megatron.launch.spares` starts it. A rank tells with `report_imports` what a spare has to import.
"""

import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

from megatron.process.early_signals import show_stacks_on_signal

IMPORTS = "NEOX_IMPORTS_FILE"
"""The variable that names the file to which a rank writes the modules it has imported."""


def report_imports() -> None:
    """Writes this process's modules to the file that the launcher asked for, at the first call alone.

    Variables that the process has set itself are written too, because modules read them as they are imported.
    A file that cannot be written is left out: without it a restart only takes longer.
    """
    name = os.environ.pop(IMPORTS, None)
    if name is None:
        return
    with suppress(OSError):
        initial = dict(line.split(b"=", 1) for line in Path("/proc/self/environ").read_bytes().split(b"\0") if line)
        variables = {key: text for key, text in os.environ.items() if initial.get(key.encode()) != os.fsencode(text)}
        modules = [module for module in list(sys.modules) if not module.endswith("__main__")]  # those are programs
        partial = Path(f"{name}.tmp")
        partial.write_text(json.dumps({"modules": modules, "environment": variables}))
        partial.replace(name)


def wait(script: str, words: list[str], imports: str, orders: int) -> None:
    """Imports modules, waits for the rank's environment variables, and then runs a script as this rank.

    script, words: the command to run. imports: a file of `report_imports`. orders: a descriptor, from which
    one line of JSON with the variables comes, or nothing if no rank is needed.
    """
    show_stacks_on_signal()
    report = json.loads(Path(imports).read_text())
    for name, text in report["environment"].items():
        os.environ.setdefault(name, text)  # those of the launcher are this rank's own
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
