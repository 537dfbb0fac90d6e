"""The package beside Megatron-Core, which has the same name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imported(statement, *path):
    """Returns the output of `python -c statement`, run in /, with these folders on its path in this order."""
    code = f"import sys; sys.path[1:1] = {[str(folder) for folder in path]}; {statement}"
    return subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True).stdout.strip()


def test_megatron_core_and_this_package_can_both_be_installed(tmp_path):
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").write_text("WHOSE = 'core'\n")
    (tmp_path / "megatron/neox_arguments").mkdir()
    (tmp_path / "megatron/neox_arguments/__init__.py").write_text("WHOSE = 'not ours'\n")
    statement = "import megatron.core, megatron.neox_arguments as own; print(megatron.core.WHOSE, own.__file__)"
    expected = f"core {ROOT}/megatron/neox_arguments/__init__.py"
    assert imported(statement, ROOT, tmp_path) == imported(statement, tmp_path, ROOT) == expected


def test_another_copy_of_this_package_lends_no_module(tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/__init__.py").touch()
    (tmp_path / "megatron/removed_since.py").touch()
    assert imported("import megatron; print(megatron.__path__)", ROOT, tmp_path) == f"['{ROOT}/megatron']"
