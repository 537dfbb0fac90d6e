"""Puts commands of a Slurm job into a container: by enroot, or by pyxis, Slurm's plugin for enroot.

    python -m megatron.launch.container COMMAND ...       # one task of this job's, in the container

The variables come from a site, such as slurm/sites/enroot.sh.
"""  # noqa: W505 (lines to copy)

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.launch.environment import LaunchError, install_root
from megatron.process import run_command

RUNTIMES = ("pyxis", "enroot")


@dataclass(frozen=True)
class Container:
    """The container of a job's tasks.

    image: a squashfs file, or for pyxis also an image's name in a registry.
    runtime: one of RUNTIMES.
    mounts: folders of the host that it sees, as SOURCE:TARGET.
    python: the interpreter in the image.
    """

    image: str
    runtime: str
    mounts: tuple[str, ...]
    python: str

    def srun_options(self) -> list[str]:
        """Returns the options of srun that start tasks in the container; none for enroot."""
        if self.runtime == "enroot":
            return []
        mounts = [f"--container-mounts={','.join(self.mounts)}"] if self.mounts else []
        return [f"--container-image={self.image}", *mounts, f"--container-workdir={os.getcwd()}"]

    def task(self, command: list[str]) -> list[str]:
        """Returns the command of a task: with enroot a script starts the container."""
        return command if self.runtime == "pyxis" else [str(install_root() / "slurm" / "enroot.sh"), *command]


def read_container(env: Mapping[str, str]) -> Container | None:
    """Returns the container that NEOX_CONTAINER and its like name; None without one.

    Raises LaunchError if NEOX_CONTAINER_RUNTIME is unknown, or if enroot shall start no file.
    """
    image, runtime = env.get("NEOX_CONTAINER"), env.get("NEOX_CONTAINER_RUNTIME") or "pyxis"
    if not image:
        return None
    if runtime not in RUNTIMES:
        raise LaunchError(f"NEOX_CONTAINER_RUNTIME={runtime}: write one of {', '.join(RUNTIMES)}")
    if (runtime == "enroot" or image.startswith("/")) and not os.path.isfile(image):
        raise LaunchError(
            f"NEOX_CONTAINER={image}: there is no such file; make it: enroot import -o {image} docker://IMAGE "
            "(docs/slurm.md)"
        )
    mounts = tuple(filter(None, (mount.strip() for mount in env.get("NEOX_CONTAINER_MOUNTS", "").split(","))))
    return Container(image, runtime, mounts, env.get("NEOX_CONTAINER_PYTHON") or "python3")


def main() -> None:
    try:
        container, command = read_container(os.environ), sys.argv[1:]
    except LaunchError as problem:
        sys.exit(f"error: {problem}")
    if container is None or not command:
        sys.exit("error: set NEOX_CONTAINER, and name a command")
    words = ["srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", *container.srun_options(), *container.task(command)]
    os.execvp(words[0], words)


if __name__ == "__main__":
    run_command(main)
