"""Command lines that a real bash completes, by the functions that argcomplete installs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.runs import ROOT

# Calls argcomplete's completion as bash does after a tab, and prints what it offers.
SCRIPT = """
eval "$(activate-global-python-argcomplete --dest=-)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
read -ra COMP_WORDS <<< "${COMP_LINE//=/ = }"
[[ "$COMP_LINE" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_python_argcomplete_global "${COMP_WORDS[0]}" "${COMP_WORDS[-1]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(line: str, cwd: Path) -> list[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", line], cwd=cwd, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in done.stdout.splitlines()]


@pytest.mark.parametrize(("line", "expected"), [
    ("python deepy.py fine", "finetune"),
    ("python deepy.py train.py 125M-", "125M-dmoe"),
    ("python deepy.py train.py mine", "mine.yml"),
    ("python deepy.py train.py mine.yml --set lr_decay_st", "lr_decay_style="),
    ("python deepy.py train.py mine.yml --set num_layers=2 lr_decay_style=cos", "cosine"),
    ("python deepy.py train.py mine.yml --set zero_optimization.round", "zero_optimization.round_robin_gradients="),
    ("python deepy.py plan mine.yml --gpus-per", "--gpus-per-node"),
    ("python deepy.py finetune a b --set lora.quantiz", "lora.quantization="),
    ("python deepy.py pipeline res", "resume"),
])  # fmt: skip
def test_bash_completes(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "mine.yml").touch()
    for name in ("deepy.py", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert complete(line, tmp_path) == [expected]


@pytest.mark.parametrize(("line", "expected"), [
    ("neox fine", "finetune"),
    ("neox train 125M-", "125M-dmoe"),
    ("neox finetune a b --prepare", "--prepare-only"),
    ("neox preprocess_data --append", "--append-eod"),
])  # fmt: skip
def test_the_installed_command_completes(tmp_path: Path, line: str, expected: str) -> None:
    """The command as `register-python-argcomplete neox` starts it."""
    out = tmp_path / "out"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
           "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}  # fmt: skip
    subprocess.run([sys.executable, "-c", "from megatron.launch.command import main; main()"], cwd=tmp_path, env=env,
                   check=True, timeout=200)  # fmt: skip
    assert out.read_text().split() == [expected]
