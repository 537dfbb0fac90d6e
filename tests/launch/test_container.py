"""Jobs in containers: the words that start one, and slurm/enroot.sh with a stand-in for enroot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.launch.container import read_container
from megatron.launch.environment import LaunchError
from megatron.launch.site import site_variables
from tests.launch.runs import ROOT, write_program

# Notes its arguments, and starts the command with the variables that enroot hands on and an image's PATH.
ENROOT = """\
#!/bin/bash
if [ "$1" != start ]; then
    echo "$*" >> "$NOTES"
    exit
fi
shift
variables=()
while [[ $1 == --* ]]; do
    case $1 in
        --env) variables+=("$2=${!2}") ;;
        --mount) echo "mount $2" >> "$NOTES" ;;
    esac
    shift 2
done
echo "start $1" >> "$NOTES"
exec env -i PATH=/usr/bin:/bin HOME=/root "${variables[@]}" "${@:2}"
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "neox.sqsh"
    path.touch()
    return path


def test_the_words_of_both_runtimes(image: Path) -> None:
    env = {"NEOX_CONTAINER": str(image), "NEOX_CONTAINER_MOUNTS": "/a:/a, /b:/c"}
    pyxis = read_container(env)
    assert pyxis is not None and pyxis.python == "python3" and pyxis.task(["x"]) == ["x"]
    mounts = "--container-mounts=/a:/a,/b:/c"
    assert pyxis.srun_options() == [f"--container-image={image}", mounts, f"--container-workdir={os.getcwd()}"]
    enroot = read_container({**env, "NEOX_CONTAINER_RUNTIME": "enroot", "NEOX_CONTAINER_PYTHON": "/opt/python"})
    assert enroot is not None and enroot.python == "/opt/python" and enroot.srun_options() == []
    assert enroot.task(["x"]) == [str(ROOT / "slurm/enroot.sh"), "x"]
    assert read_container({}) is None


@pytest.mark.parametrize(("variables", "message"), [
    ({"NEOX_CONTAINER_RUNTIME": "docker"}, "NEOX_CONTAINER_RUNTIME=docker: write one of pyxis, enroot"),
    ({"NEOX_CONTAINER": "/no/such.sqsh"}, "NEOX_CONTAINER=/no/such.sqsh: there is no such file; make it: enroot"),
    ({"NEOX_CONTAINER": "ubuntu", "NEOX_CONTAINER_RUNTIME": "enroot"}, "NEOX_CONTAINER=ubuntu: there is no such file"),
])  # fmt: skip
def test_what_no_runtime_can_start(variables: dict[str, str], message: str, image: Path) -> None:
    with pytest.raises(LaunchError, match=message):
        read_container({"NEOX_CONTAINER": str(image), **variables})


@pytest.mark.parametrize("can_mount", [True, False])
def test_enroot_gets_the_tasks_variables_and_none_of_the_hosts_programs(
    can_mount: bool, image: Path, tmp_path: Path
) -> None:
    for name in ("enroot", *(("squashfuse", "fuse-overlayfs") if can_mount else ())):
        write_program(tmp_path / f"bin/{name}", ENROOT)
    env = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "NOTES": str(tmp_path / "notes"), "NEOX_CONTAINER": str(image),
        "NEOX_CONTAINER_MOUNTS": "/a:/a,/b:/c", "SLURM_NODEID": "3", "TWO_LINES": "one\ntwo", "PYTHONPATH": "/host",
    }  # fmt: skip
    show = 'import os; print([os.environ.get(n) for n in ("SLURM_NODEID", "TWO_LINES", "PYTHONPATH")], os.getcwd())'
    command = [str(ROOT / "slurm/enroot.sh"), sys.executable, "-c", show]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{['3', 'one' + chr(10) + 'two', None]} {tmp_path}\n"
    unpacked = f"neox-{int(image.stat().st_mtime)}"
    start = [f"start {image}"] if can_mount else [f"start {unpacked}"]
    created = [] if can_mount else ["list", f"create --name {unpacked} {image}"]
    assert (tmp_path / "notes").read_text().splitlines() == [*created, "mount /a:/a", "mount /b:/c", *start]


def test_the_site_takes_pyxis_where_srun_has_it(tmp_path: Path) -> None:
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "NEOX_SITE": "enroot", "NEOX_SHARED": "/s", "NEOX_NODES": "7"}
    for options, runtime in (("--nodes", "enroot"), ("--container-image=IMAGE", "pyxis")):
        write_program(tmp_path / "bin/srun", f"#!/bin/sh\necho ' {options}'\n")
        site = site_variables(env)
        assert site["NEOX_CONTAINER_RUNTIME"] == runtime and site["NEOX_NODES"] == "7"
        assert site["NEOX_CONTAINER_MOUNTS"] == f"/s:/s,{ROOT}:{ROOT}"
    with pytest.raises(LaunchError, match="NEOX_SHARED: is not set"):
        site_variables({**env, "NEOX_SHARED": ""})
