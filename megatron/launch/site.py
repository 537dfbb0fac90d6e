"""What belongs to a cluster: the variables of `slurm/sites/<NEOX_SITE>.sh`."""

import os
import subprocess
from collections.abc import Mapping

from megatron.launch.environment import LaunchError
from megatron.launch.home import home


def site_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The site's NEOX_* variables, those of `env` first; empty where NEOX_SITE names no site.

    Raises LaunchError for a site that is not there or stops.
    """
    env = os.environ if env is None else env
    name = env.get("NEOX_SITE")
    if not name:
        return {}
    sites = home() / "slurm" / "sites"
    file = sites / f"{name}.sh"
    if not file.is_file():
        there = ", ".join(sorted(path.stem for path in sites.glob("*.sh")))
        raise LaunchError(f"NEOX_SITE={name}: there is no {file}; there are {there}")
    # `env -0` alone on stdout: a site may print.
    shell = subprocess.run(
        ["bash", "-c", 'source "$1" >&2 && env -0', "bash", str(file)], env=dict(env), capture_output=True, text=True
    )
    if shell.returncode:
        raise LaunchError(f"{file}: {shell.stderr.strip() or f'ended with code {shell.returncode}'}")
    pairs = (line.partition("=") for line in shell.stdout.split("\0") if line.startswith("NEOX_"))
    return {key: value for key, _, value in pairs if value}
