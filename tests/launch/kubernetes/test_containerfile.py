"""The image's recipe without an image: what it copies is there, and works for a user without a name."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.runs import ROOT
from tests.training.runs import ADAMW, LLAMA, config

RANDOM_USER = 1000650000  # of the range that OpenShift takes them from


def instructions() -> list[tuple[str, str]]:
    """(name, the rest) of each instruction, continued lines joined."""
    text = (ROOT / "kubernetes" / "Containerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(arguments.split())) for name, arguments in lines]


def variables() -> dict[str, str]:
    return dict(word.split("=", 1) for name, arguments in instructions() if name == "ENV" for word in arguments.split())


def test_it_is_what_openshift_runs() -> None:
    all_instructions = instructions()
    assert {name for name, _ in all_instructions} <= {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "CMD"}
    [base] = [arguments for name, arguments in all_instructions if name == "ARG" and arguments.startswith("BASE=")]
    assert re.search(r":\d[\w.-]*$", base) and "latest" not in base
    [user] = [arguments for name, arguments in all_instructions if name == "USER"]
    assert re.fullmatch(r"[1-9]\d*:0", user), "a number, for runAsNonRoot, in the group that OpenShift gives"
    [rights] = [arguments for name, arguments in all_instructions if name == "RUN" and "chmod" in arguments]
    folders, groups, modes = (set(re.findall(r"/[\w/]+", part)) for part in rights.split("&&"))
    assert variables()["HOME"] in folders and {"/shared/data", "/shared/models", "/workspace"} <= folders
    assert groups == modes and all(any(Path(path).is_relative_to(top) for top in modes) for path in folders)
    assert [arguments.split(" AS ")[1] for name, arguments in all_instructions if name == "FROM"] == [
        "mounted",
        "baked",
    ]


def test_what_it_copies_is_there_and_enough() -> None:
    copied = [word for name, arguments in instructions() if name == "COPY" for word in arguments.split()[:-1]]
    sources = [word for word in copied if not word.startswith(("--", "$"))]
    assert all((ROOT / source).exists() for source in sources)
    assert not {".", "*", ".env"} & set(sources), "no secret that lies beside goes in"
    assert {"deepy.py", "train.py", "megatron", "tools", "configs", "post-training"} <= set(sources)
    extras = re.search(r'EXTRAS="([\w,]+)"', str(instructions()))
    assert extras
    declared = re.search(r"\[project.optional-dependencies\](.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.S)
    assert declared and all(re.search(rf"^{name} = ", declared[1], re.M) for name in extras[1].split(","))
    assert "monitoring" in extras[1], "metrics_port is open in the pods"


# It may read all, as in the image, where nothing is closed to it; here Python may be in root's home.
# What it may write is what its number and group may.
USER = ("setpriv", f"--reuid={RANDOM_USER}", "--regid=0", "--clear-groups", "--no-new-privs",
        "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # fmt: skip


def missing() -> str:
    """Why no other user can train here; "" where one can."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return "takes another user's number: root, and setpriv"
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    done = subprocess.run([*USER, sys.executable, "-c", script], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"root gives nobody else what it may read: {done.stderr.strip()[-300:]}"


@pytest.mark.parametrize("home", [
    pytest.param(True, id="as-in-the-image", marks=pytest.mark.product),
    pytest.param(False, id="no-home", marks=pytest.mark.product),
])  # fmt: skip
def test_a_user_without_a_name_trains(home: bool, tmp_path: Path) -> None:
    """With nothing to write to but what group 0 may: two ranks train, save and answer metrics_port."""
    if missing():
        pytest.skip(missing())
    for folder in (tmp_path / "home", tmp_path / "models"):
        folder.mkdir()
        folder.chmod(0o775)  # root's, of group 0, as the image's
    values = config(LLAMA, ADAMW, train_iters=3, checkpoint_factor=3, save=str(tmp_path / "models" / "run"),
                    metrics_port=0, index_cache_dir=str(tmp_path / "models" / "index"), num_workers=1,
                    compile=False)  # fmt: skip
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "deepy.py", "--num_gpus", "2", "train.py", str(tmp_path / "tiny.yml")]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if home:
        environment |= {**variables(), "HOME": str(tmp_path / "home")}
    done = subprocess.run([*USER, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    save = tmp_path / "models" / "run"
    assert json.loads((save / "status.json").read_text())["status"] == "finished"
    assert (save / "status.json").stat().st_uid == RANDOM_USER
