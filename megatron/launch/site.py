"""Reads the settings of a cluster: the variables of `slurm/sites/<NEOX_SITE>.sh`."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.launch.environment import LaunchError, install_root
from megatron.neox_arguments.values.integers import parse_integer

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def site_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the NEOX_* variables of the cluster that NEOX_SITE names; {} if NEOX_SITE is unset.

    Variables in `env` win over the values in the site's file. Raises LaunchError if this file does not exist
    or fails.
    """
    env = os.environ if env is None else env
    name = env.get("NEOX_SITE")
    if not name:
        return {}
    sites = install_root() / "slurm" / "sites"
    file = sites / f"{name}.sh"
    if not file.is_file():
        sites_here = ", ".join(sorted(path.stem for path in sites.glob("*.sh")))
        raise LaunchError(f"NEOX_SITE={name}: there is no {file}; choose one of {sites_here}")
    # Only `env -0` writes to stdout: the site's file may print too.
    words = ["bash", "-c", 'source "$1" >&2 && env -0', "bash", str(file)]
    shell = subprocess.run(words, env=dict(env), capture_output=True, text=True)
    if shell.returncode:
        reason = shell.stderr.strip() or f"exit code {shell.returncode}"
        raise LaunchError(f"NEOX_SITE={name}: sourcing {file} failed: {reason}")
    pairs = (line.partition("=") for line in shell.stdout.split("\0") if line.startswith("NEOX_"))
    return {key: value for key, _, value in pairs if value}


def checkpoint_folder(site: Mapping[str, str]) -> str:
    """Returns the folder to which conversions write and from which uploads read: NEOX_CHECKPOINT_DIR, else
    `checkpoints`."""
    return site.get("NEOX_CHECKPOINT_DIR") or "checkpoints"


def starts_from_a_model(args: "NeoXArgs") -> bool:
    """Returns whether a run starts from trained weights: fine-tuning, preference or reinforcement training,
    labelled data, or `load: hf://...`."""
    from_hub = args.load is not None and args.load.startswith("hf://")
    labelled = args.train_label_data_paths is not None
    return args.finetune or args.train_impl != "normal" or labelled or from_hub


def site_nodes(from_model: bool, configs: Sequence[str], site: Mapping[str, str]) -> tuple[int | None, str]:
    """Returns (the number of nodes that a site sets for a run, the kind of run in words). The number is None
    if the site sets none.

    from_model: whether the run starts from trained weights. configs: absolute paths of its configuration
    files; if one matches a pattern of NEOX_MIDTRAINING, the kind is mid-training. Raises LaunchError if the
    site's value is not a number.
    """
    patterns = site.get("NEOX_MIDTRAINING", "").split()
    if not from_model:
        name, kind = "NEOX_NODES_PRETRAIN", "pre-training"
    elif any(fnmatchcase(path, pattern) for path in configs for pattern in patterns):
        name, kind = "NEOX_NODES_PRETRAIN", "mid-training"
    else:
        name, kind = "NEOX_NODES", "training that starts from a model"
    if name not in site:
        return None, kind
    if not (nodes := parse_integer(site[name])):
        raise LaunchError(f"{name}={site[name]!r} is not a number of nodes; correct it (see slurm/sites)")
    return nodes, kind


def sbatch_line(args: "NeoXArgs", env: Mapping[str, str]) -> str:
    """Returns the sbatch command that submits a run, with the nodes, GPUs and log folder of the site."""
    places = dict.fromkeys(origin.rpartition(":")[0] for origin in args.origins.values())
    configs = [os.path.abspath(place) for place in places if Path(place).is_file()]
    site = site_variables(env)
    nodes, _ = site_nodes(starts_from_a_model(args), configs, site)
    return shlex.join(["sbatch", *sbatch_options(nodes, site), "pretrain_neox.sbatch", *configs])


def sbatch_options(nodes: int | None, site: Mapping[str, str]) -> list[str]:
    """Returns sbatch's options for the nodes, GPUs and log folder of a run."""
    options = [f"--nodes={nodes}"] if nodes else []
    options += [f"--gres=gpu:{site['NEOX_GPUS_PER_NODE']}"] if "NEOX_GPUS_PER_NODE" in site else []
    return options + ([f"--output={site['NEOX_LOG_DIR']}/%x-%j.out"] if "NEOX_LOG_DIR" in site else [])
