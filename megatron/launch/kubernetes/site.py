"""Reads and checks a site file, which describes a Kubernetes cluster and what a job on it gets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.frozen import freeze
from megatron.neox_arguments.keys.declaration import REQUIRED, keys_of, new_key
from megatron.neox_arguments.reading.declared_file import read_declared
from megatron.neox_arguments.validation.types import check_keys
from megatron.neox_arguments.values.integers import parse_integer

# Default variables of a container; WORLD_SIZE is computed.
VARIABLES: Mapping[str, str] = {
    "EPOCHS": "4", "BATCH_SIZE": "8", "LEARNING_RATE": "5e-5", "MASTER_PORT": "23456", "NCCL_DEBUG": "INFO",
    "DATA_DIR": "/shared/data", "OUTPUT_DIR": "/shared/models",
}  # fmt: skip
# Defaults of keys that are mappings, which a dataclass does not take as defaults
_UNSET: Mapping[str, Mapping[str, Any]] = {
    "claims": {
        "trained-models-pvc": {"path": "/shared/models", "size": "200Gi"},
        "workspace-pvc": {"path": "/workspace", "size": "100Gi"},
    },
    "secrets": {"HF_TOKEN": "neox-secrets/HF_TOKEN", "WANDB_API_KEY": "neox-secrets/WANDB_API_KEY"},
}
# Variables whose values differ by pod or rank, so that a site must not set them
_PER_POD_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "LOCAL_WORLD_SIZE", "NODE_RANK")
_SECRET = re.compile(r"(^|_)(\w*KEY|TOKEN|SECRET|PASSWORD)$")
# Tokens of the Hub, Weights & Biases, GitHub and AWS, whatever the variable is called.
_SECRET_VALUE = re.compile(r"hf_\w{20,}|\b[0-9a-f]{40}\b|gh[pousr]_\w{20,}|\bAKIA[A-Z0-9]{16}\b")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # of RFC 1123, a part of a host's name
_DOTTED_NAME = re.compile(rf"{_NAME.pattern}(\.{_NAME.pattern})*")
_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_LABEL = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)  # the value of one
_LABEL_NAME = re.compile(rf"({_DOTTED_NAME.pattern}/)?[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?", re.ASCII)
_NAME_LENGTH = 45  # of a job: operators append texts such as `-node-0-0-xxxxx`, and names have at most 63 characters


@dataclass(frozen=True)
class Claim:
    """One entry of `claims`: a volume that all pods mount and that outlives them (ReadWriteMany)."""

    path: str = new_key(REQUIRED, "Folder at which pods mount the volume")
    size: str = new_key(None, "Requested size, such as 200Gi; unset: the claim already exists and is not created")


@dataclass(frozen=True)
class Site:
    """The keys of a site file, which describes a job and its Kubernetes cluster. Values in its mappings are
    text."""

    namespace: str = new_key(REQUIRED, "Namespace (OpenShift: project) of all objects")
    image: str = new_key(REQUIRED, "Image of kubernetes/Containerfile, with a tag other than latest or a digest")
    name: str = new_key("neox", "Name of the job; a second job in the namespace needs another name")
    replicas: int = new_key(4, "Pods", ge=1)
    gpus: int = new_key(1, "GPUs of each pod, each with one rank", ge=1)
    gpu_resource: str = new_key("nvidia.com/gpu", "The cluster's resource name of a GPU")
    cpus: int = new_key(6, "Cores of each pod", ge=1)
    memory: str = new_key("20Gi", "Memory of each pod")
    shared_memory: str = new_key("2Gi", "Size of /dev/shm, which data workers and NCCL use; it counts as memory")
    claims: Mapping[str, Any] = new_key(
        None,
        "Volumes, by the name of their claim, each with path and size; unset: trained-models-pvc, workspace-pvc",
    )
    storage_class: str | None = new_key(None, "Storage class of claims that are created; unset: the cluster's default")
    variables: Mapping[str, Any] = new_key(
        None, "Environment variables of the container: they replace defaults or add to them"
    )
    secrets: Mapping[str, Any] = new_key(
        None,
        "Environment variables with values from secrets, as SECRET/KEY; unset: HF_TOKEN, WANDB_API_KEY of neox-secrets",
    )
    restarts: int = new_key(10, "How often all pods may start again after one was lost", ge=0)
    metrics_port: int = new_key(8000, "metrics_port of a run that does not set it; 0: none", ge=0, le=65535)
    queue: str | None = new_key(None, "Kueue's local queue, which OpenShift's view of distributed workloads shows")
    labels: Mapping[str, Any] = new_key(None, "Further labels of jobs and pods")
    annotations: Mapping[str, Any] = new_key(None, "Further annotations of pods")
    node_selector: Mapping[str, Any] = new_key(None, "Labels that a node must have to run a pod")
    image_pull_secret: str | None = new_key(None, "Secret with the credentials for the image registry")

    @property
    def world_size(self) -> int:
        """Returns the number of ranks in all pods."""
        return self.replicas * self.gpus

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that are the same in all pods."""
        site_variables = {name: str(value) for name, value in self.variables.items()}
        return {**VARIABLES, "WORLD_SIZE": str(self.world_size), **site_variables}

    def volumes(self) -> dict[str, str]:
        """Returns the folder at which pods mount each claim, by the claim's name."""
        return {name: claim["path"] for name, claim in self.claims.items()}


def read_site(file: str | Path) -> Site:
    """Returns the site that a YAML file describes.

    Raises ConfigError with a line `FILE:LINE: key: problem` for each mistake found; a missing key has no line
    number. Values are checked once keys, types and claims are right. For an unknown key the line suggests the
    nearest known keys.
    """
    origins: dict[str, str] = {}
    problems = ErrorCollector(origins)
    values = check_keys(Site, read_declared(file, origins, problems), problems)
    problems.raise_if_any()
    for name, value in values.items():
        if value is None and keys_of(Site)[name].type == Mapping[str, Any]:
            values[name] = _UNSET.get(name, {})
    claims = values["claims"]
    values["claims"] = {}
    for name, claim in claims.items():
        if not isinstance(claim, Mapping):
            problems.add(f"claims.{name}", "expected a mapping with path and size")
            continue
        values["claims"][name] = check_keys(Claim, dict(claim), problems, f"claims.{name}.")
    problems.raise_if_any()
    site = Site(**{item.name: freeze(values[item.name]) for item in fields(Site)})
    _check(site, problems)
    problems.raise_if_any()
    return site


def _check(site: Site, problems: ErrorCollector) -> None:
    """Adds a problem for each value that a cluster would refuse, or with which the job could not run."""
    for key, length in (("name", _NAME_LENGTH), ("namespace", 63)):
        if not _NAME.fullmatch(getattr(site, key)) or len(getattr(site, key)) > length:
            problems.add(key, f"expected at most {length} lower-case letters, digits and hyphens, such as my-run")
    for key in ("storage_class", "image_pull_secret"):
        if getattr(site, key) is not None and not _DOTTED_NAME.fullmatch(getattr(site, key)):
            problems.add(key, "is not a Kubernetes name: use lower-case letters, digits, hyphens and dots")
    for key in ("memory", "shared_memory"):
        _check_quantity(key, getattr(site, key), problems)
    tag = site.image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest") and "@sha256:" not in site.image:
        problems.add("image", "names no fixed release; add a tag other than latest (:1.0) or a digest (@sha256:...)")
    for name, claim in site.claims.items():
        if not _DOTTED_NAME.fullmatch(name):
            problems.add(f"claims.{name}", "is not a Kubernetes name: use lower-case letters, digits, hyphens and dots")
        if not claim["path"].startswith("/"):
            problems.add(f"claims.{name}.path", "must be an absolute path, such as /shared/models")
        if claim["size"] is not None:
            _check_quantity(f"claims.{name}.size", claim["size"], problems)
        first_claim = min(other_name for other_name, path in site.volumes().items() if path == claim["path"])
        if name != first_claim:
            problems.add(
                f"claims.{name}.path", f"is also the path of claim {first_claim}; give each claim its own folder"
            )
    if not _LABEL_NAME.fullmatch(site.gpu_resource):
        problems.add("gpu_resource", "is not a resource name such as nvidia.com/gpu; correct it")
    if site.queue is not None and not _NAME.fullmatch(site.queue):
        problems.add("queue", "is not a Kubernetes name: use lower-case letters, digits and hyphens")
    for key in ("labels", "annotations", "node_selector"):
        for name, value in getattr(site, key).items():
            if not isinstance(value, str):
                problems.add(f"{key}.{name}", f'must be text: write "{str(value).lower()}" in quotes')
            elif not _LABEL_NAME.fullmatch(name):
                problems.add(f"{key}.{name}", "is not a label name such as example.com/team; correct it")
            elif key != "annotations" and not _LABEL.fullmatch(value):
                problems.add(
                    f"{key}.{name}", f"{value}: use up to 63 letters, digits, -, . and _, and no sign at an end"
                )
            elif _SECRET_VALUE.search(value):
                problems.add(
                    f"{key}.{name}", "looks like a secret, which every reader of the manifest would see; remove it"
                )
    _check_variables(site, problems)


def _check_variables(site: Site, problems: ErrorCollector) -> None:
    for name, value in site.variables.items():
        path = f"variables.{name}"
        if not _VARIABLE.fullmatch(name) or isinstance(value, Mapping | tuple):
            problems.add(
                path, "expected NAME: VALUE, with a name of letters, digits and underscores, and a text or number"
            )
        elif name in _PER_POD_VARIABLES or name.startswith("PET_"):
            problems.add(
                path, "differs from pod to pod or from rank to rank; the operator and deepy.py set it; remove it"
            )
        elif name == "WORLD_SIZE" and str(value) != str(site.world_size):
            problems.add(
                path, f"contradicts replicas {site.replicas} x gpus {site.gpus} = {site.world_size}; remove it"
            )
        elif name == "MASTER_PORT" and not 0 < (parse_integer(str(value)) or 0) < 65536:
            problems.add(path, "is not a port number (1 to 65535); correct it")
        elif _SECRET.search(name.upper()) or _SECRET_VALUE.search(str(value)):
            problems.add(path, "looks like a secret, which every reader of the manifest would see; use the key secrets")
    for name, place in site.secrets.items():
        secret, _, key = str(place).partition("/")
        if not _VARIABLE.fullmatch(name) or not _DOTTED_NAME.fullmatch(secret) or not re.fullmatch(r"[-._\w]+", key):
            problems.add(
                f"secrets.{name}", "expected SECRET/KEY: the name of a secret and a key in that secret, never the value"
            )
        elif name in site.variables and not _SECRET.search(name.upper()):
            problems.add(f"secrets.{name}", "is also set in variables; remove one of them")


def _check_quantity(path: str, value: str, problems: ErrorCollector) -> None:
    if not _QUANTITY.fullmatch(value):
        problems.add(path, f'expected an amount such as 20Gi, got "{value}"')
