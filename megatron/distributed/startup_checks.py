"""Checks, before the process group is initialised, that all ranks are present and start alike.

They must have the same configuration, code and libraries, and see the same folder `save`.
"""

import hashlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.distributed.rendezvous import Process, Rendezvous, StartError, format_ranks
from megatron.neox_arguments import NeoXArgs, flat_values, yaml_value
from megatron.neox_arguments.keys.declaration import keys_of

PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("torch", "deepspeed", "numpy", "transformers", "tokenizers")
# Only these keys, and RunnerKeys (how ranks are started), may differ between ranks
_MACHINE_KEYS = ("config_files", "log_dir", "local_save", "remote_staging")
_PROBE_S = 15.0  # NFS may take a while to show a new file to another machine
_MAX_ITEMS = 5  # most differences or hosts that a message lists


def rendezvous_and_check(
    args: NeoXArgs, process: Process, logger: logging.Logger, shared: str | Path | None = None
) -> dist.Store | None:
    """Waits for all ranks, checks that they start alike, and returns the store for their process group.

    Returns None for a single rank, or if torch.distributed is already initialised. Raises StartError on every
    rank if ranks are missing, or differ in configuration, code or libraries. Files that each machine must
    download for itself are downloaded between this call and `init_process_group`.

    shared: a folder that must be the same on all machines, created if missing; None: no folder is checked.
    """
    if process.world_size == 1 or dist.is_initialized():
        return None
    rendezvous = Rendezvous(process, args.rendezvous_timeout_s, logger)
    try:
        rendezvous.arrive(rank_info(args, process))
        if process.rank == 0:
            _compare(rendezvous, args, shared)
        else:
            rendezvous.answer_until_released(lambda question: _answer(question, args))
        return rendezvous.release(timedelta(minutes=args.first_step_limit_mins))
    except dist.DistError as problem:
        raise StartError(
            f"rank {process.rank} (host {rendezvous.host}) lost its connection to rank 0 at "
            f"{process.master_addr}:{process.master_port} during the start, probably because rank 0 has ended; see the "
            f"output of rank 0 ({str(problem).splitlines()[0]})"
        ) from None


def rank_info(args: NeoXArgs, process: Process) -> dict[str, Any]:
    """Returns what this rank reports about itself at the rendezvous. All values must be equal on all ranks,
    except `first`: whether this is the first rank of its machine."""
    return {
        "first": process.local_rank == 0,  # of its machine
        "configuration": digest(configuration(args)),
        "code": digest(source_digests()),
        "libraries": library_versions(),
    }


def digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of `content` written as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def configuration(args: NeoXArgs) -> dict[str, str]:
    """Returns every value that must be the same on all ranks, as {dotted path: value in YAML}."""
    keys = keys_of(type(args))
    return {
        path: yaml_value(value)
        for path, value in flat_values(args)
        if keys[path.split(".")[0]].owner != "RunnerKeys" and path not in _MACHINE_KEYS
    }


def source_digests(package: Path = PACKAGE, script: str | None = None) -> dict[str, str]:
    """Returns {file name: SHA-256} of the Python files in the folder `package` and of the entry script.

    script: path of the entry script; None: the script that Python runs.
    """
    if script is None:
        script = getattr(sys.modules["__main__"], "__file__", None)
    prefix = f"{package.parent}/"
    files: dict[str, str] = {}
    for folder, _, names in os.walk(package):
        files |= {f"{folder}/{name}".removeprefix(prefix): f"{folder}/{name}" for name in names if name.endswith(".py")}
    if script is not None and os.path.isfile(script):
        files[os.path.basename(script)] = script
    digests = {}
    for name, path in files.items():
        with open(path, "rb") as file:
            digests[name] = hashlib.sha256(file.read()).hexdigest()
    return digests


def library_versions() -> dict[str, str]:
    """Returns {name: version} of Python, CUDA, NCCL and the libraries that affect results and collectives."""
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    if torch.cuda.is_available():
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return versions


def _compare(rendezvous: Rendezvous, args: NeoXArgs, shared: str | Path | None) -> None:
    """Aborts the start if ranks differ in libraries, configuration or code, or if `shared` is not the same
    folder on all machines. Only rank 0 calls it."""
    compared = {
        "libraries": (_library_differences, "install the same versions on every machine (one constraints.txt)"),
        "configuration": (configuration_differences, "start all ranks with the same configuration files and flags"),
        "code": (code_differences, "install the same version of the code on every machine"),
    }
    infos = rendezvous.rank_infos()
    problems = []
    for kind, (differences_of, advice) in compared.items():
        ranks_by_info: dict[str, list[int]] = {}
        for rank, info in enumerate(infos):
            if info[kind] != infos[0][kind]:
                ranks_by_info.setdefault(json.dumps(info[kind]), []).append(rank)
        for ranks in list(ranks_by_info.values())[:_MAX_ITEMS]:
            remote, local = infos[ranks[0]][kind], infos[0][kind]
            if kind != "libraries":  # of configuration and code, rank infos hold only digests
                remote, local = rendezvous.ask({kind: None}, ranks[:1])[ranks[0]], _answer({kind: None}, args)
            differences = differences_of(remote, local)
            omitted = [f"and {len(differences) - _MAX_ITEMS} more"] if len(differences) > _MAX_ITEMS else []
            ranks_text = f"{format_ranks(ranks)} (host {_hosts(infos, ranks)})"
            text = "; ".join([*differences[:_MAX_ITEMS], *omitted])
            problems.append(f"{ranks_text} and rank 0 (host {infos[0]['host']}) differ in {kind}: {text}; {advice}")
    if problems:
        rendezvous.abort("\n".join(problems))
    first_ranks = [rank for rank, info in enumerate(infos) if info["first"] and rank]
    if shared is not None and first_ranks:
        problem = _probe(rendezvous, Path(shared), first_ranks, infos)
        if problem is not None:
            rendezvous.abort(problem)


def _answer(question: Mapping[str, Any], args: NeoXArgs) -> Any:
    """Returns this rank's answer to a question of rank 0: its configuration, the digests of its source files,
    or whether it sees a file."""
    if "configuration" in question:
        values = configuration(args)
        return {path: [value, args.origin(path)] for path, value in values.items()}
    if "code" in question:
        return {"package": str(PACKAGE), "files": source_digests()}
    return _look_for(Path(question["probe"]))


def _library_differences(remote: Mapping[str, str], local: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {remote.get(name, 'not installed')}, but {local.get(name, 'not installed')} on rank 0"
        for name in dict.fromkeys([*local, *remote])
        if remote.get(name) != local.get(name)
    ]


def configuration_differences(remote: Mapping[str, Sequence[str]], local: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns one line of text for each key whose value differs between another rank and rank 0.

    remote, local: the configurations of the other rank and of rank 0: {dotted path: (value, where it is
        set)}.

    If a value that was set in a file or flag differs, differences in defaults and derived values are omitted.
    """
    unset = ("unset", "default")
    differ = [
        (path, remote.get(path, unset), local.get(path, unset))
        for path in dict.fromkeys([*local, *remote])
        if remote.get(path, unset)[0] != local.get(path, unset)[0]
    ]
    implicit = ("default", "derived")
    written = [row for row in differ if row[1][1] not in implicit or row[2][1] not in implicit]
    return [
        f"{path} is {_short(remote_value[0])} ({remote_value[1]}), but {_short(local_value[0])} ({local_value[1]}) on "
        "rank 0"
        for path, remote_value, local_value in written or differ
    ]


def code_differences(remote: Mapping[str, Any], local: Mapping[str, Any]) -> list[str]:
    """Returns one line of text for each source file that differs between another rank and rank 0.

    remote, local: the source files of the other rank and of rank 0: {"package": folder, "files": {name:
        SHA-256}}.
    """
    lines = []
    for name in sorted({*remote["files"], *local["files"]}):
        remote_value, local_value = remote["files"].get(name), local["files"].get(name)
        if remote_value != local_value:
            one_sided = "is missing on rank 0" if remote_value else "is only on rank 0"
            lines.append(f"{name} {'differs' if remote_value and local_value else one_sided}")
    lines = lines or ["a file was changed while the ranks started"]
    if remote["package"] != local["package"]:
        lines[0] = f"the package is {remote['package']}, but {local['package']} on rank 0: {lines[0]}"
    return lines


def _probe(
    rendezvous: Rendezvous, folder: Path, ranks: Sequence[int], infos: Sequence[Mapping[str, Any]]
) -> str | None:
    """Checks that `folder` is the same on all machines: writes a file there and asks `ranks` whether they see
    it.

    Returns None if all of them see the file, else an error message. Only rank 0 calls it.

    ranks: one rank of each other machine. infos: the mapping that each rank reported, in rank order.
    """
    file = folder.resolve() / f".probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as problem:
        return (
            f"save: {folder} cannot be written on host {rendezvous.host} ({problem.strerror}); set save to a writable "
            "folder"
        )
    # Ranks look under the path as configured: a relative path must lead to the same folder everywhere.
    try:
        answers = rendezvous.ask({"probe": str(folder / file.name)}, ranks)
    finally:
        file.unlink(missing_ok=True)
    blind_ranks = [rank for rank in ranks if not answers[rank]["seen"]]
    if not blind_ranks:
        return None
    remote_folder = answers[blind_ranks[0]]["folder"]
    blind = f"{format_ranks(blind_ranks)} (host {_hosts(infos, blind_ranks)})"
    return (
        f"save: {folder} is not the same folder on all machines: a file that rank 0 wrote into {folder.resolve()} "
        f"(host {rendezvous.host}) is not visible in {remote_folder} on {blind}; set save to a folder on storage that "
        "every machine mounts at the same path, or to s3://BUCKET/FOLDER"
    )


def _look_for(file: Path) -> dict[str, Any]:
    end = time.monotonic() + _PROBE_S
    while not (is_visible := file.exists()) and time.monotonic() < end:
        time.sleep(0.1)
        if file.parent.is_dir():
            os.listdir(file.parent)  # makes a network file system refresh its cache
    return {"seen": is_visible, "folder": str(file.parent.resolve())}


def _hosts(infos: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(infos[rank]["host"] for rank in ranks))
    return ", ".join(hosts[:_MAX_ITEMS]) + (f" and {len(hosts) - _MAX_ITEMS} more" if len(hosts) > _MAX_ITEMS else "")


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
