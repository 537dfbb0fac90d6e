"""Before ranks are connected: all have come, run the same configuration, code and libraries, and share `save`."""

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

from megatron.distributed.rendezvous import Process, Rendezvous, StartError, named
from megatron.neox_arguments import NeoXArgs, flat_values, yaml_value
from megatron.neox_arguments.keys.declaration import keys_of

PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("torch", "deepspeed", "numpy", "transformers", "tokenizers")
_OF_A_MACHINE = ("config_files", "log_dir", "remote_staging")  # may differ, as may RunnerKeys: how ranks are started
_PROBE_S = 15.0  # NFS may take a while to show a new file to another machine
_SHOWN = 5  # differences of one kind


def meet(
    args: NeoXArgs, process: Process, logger: logging.Logger, shared: str | Path | None = None
) -> dist.Store | None:
    """Wait for all ranks and compare them; the store of their process group. None where there is nothing to connect.

    shared: a folder, made if it is not there, that all machines must see as one. What machines fetch alone comes
    between this and `join`. Raises StartError on every rank.
    """
    if process.world_size == 1 or dist.is_initialized():
        return None
    rendezvous = Rendezvous(process, args.rendezvous_timeout_s, logger)
    try:
        rendezvous.arrive(card(args, process))
        if process.rank == 0:
            _compare(rendezvous, args, shared)
        else:
            rendezvous.follow(lambda question: _answer(question, args))
        return rendezvous.go(timedelta(minutes=args.first_step_timeout_mins))
    except dist.DistError as problem:
        raise StartError(
            f"rank {process.rank} (host {rendezvous.host}) lost rank 0 at {process.master_addr}:{process.master_port} "
            f"before all ranks had met: it ended, see its output ({str(problem).splitlines()[0]})"
        ) from None


def card(args: NeoXArgs, process: Process) -> dict[str, Any]:
    """What a rank says of itself when it comes; all but its place must be the same everywhere."""
    return {
        "first": process.local_rank == 0,  # of its machine
        "configuration": digest(configuration(args)),
        "code": digest(sources()),
        "libraries": libraries(),
    }


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a mapping."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def configuration(args: NeoXArgs) -> dict[str, str]:
    """Every value that must be the same on all ranks, as a line of YAML by dotted path."""
    keys = keys_of(type(args))
    return {
        path: yaml_value(value)
        for path, value in flat_values(args)
        if keys[path.split(".")[0]].owner != "RunnerKeys" and path not in _OF_A_MACHINE
    }


def sources(package: Path = PACKAGE, script: str | None = None) -> dict[str, str]:
    """SHA-256 of our source files and of the entry script, by name."""
    if script is None:
        script = getattr(sys.modules["__main__"], "__file__", None)
    around = f"{package.parent}/"
    files: dict[str, str] = {}
    for folder, _, names in os.walk(package):
        files |= {f"{folder}/{name}".removeprefix(around): f"{folder}/{name}" for name in names if name.endswith(".py")}
    if script is not None and os.path.isfile(script):
        files[os.path.basename(script)] = script
    found = {}
    for name, path in files.items():
        with open(path, "rb") as file:
            found[name] = hashlib.sha256(file.read()).hexdigest()
    return found


def libraries() -> dict[str, str]:
    """Versions of what numbers and collectives depend on."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def _compare(rendezvous: Rendezvous, args: NeoXArgs, shared: str | Path | None) -> None:
    """Rank 0: stop the start if ranks are not alike, or `shared` is not one folder."""
    compared = {
        "libraries": (_library_differences, "use one environment, or one constraints.txt, on every machine"),
        "configuration": (configuration_differences, "start all ranks with the same files and flags"),
        "code": (code_differences, "install the same version on every machine"),
    }
    cards = rendezvous.cards()
    problems = []
    for kind, (differences_of, end) in compared.items():
        alike: dict[str, list[int]] = {}
        for rank, other in enumerate(cards):
            if other[kind] != cards[0][kind]:
                alike.setdefault(json.dumps(other[kind]), []).append(rank)
        for ranks in list(alike.values())[:_SHOWN]:
            theirs, ours = cards[ranks[0]][kind], cards[0][kind]
            if kind != "libraries":  # else the cards say all
                theirs, ours = rendezvous.ask({kind: None}, ranks[:1])[ranks[0]], _answer({kind: None}, args)
            differences = differences_of(theirs, ours)
            more = [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
            who = f"{named(ranks)} (host {_hosts(cards, ranks)})"
            text = "; ".join([*differences[:_SHOWN], *more])
            problems.append(f"{who} and rank 0 (host {cards[0]['host']}) differ in {kind}: {text}; {end}")
    if problems:
        rendezvous.stop("\n".join(problems))
    elsewhere = [rank for rank, other in enumerate(cards) if other["first"] and rank]
    if shared is not None and elsewhere:
        problem = _probe(rendezvous, Path(shared), elsewhere, cards)
        if problem is not None:
            rendezvous.stop(problem)


def _answer(question: Mapping[str, Any], args: NeoXArgs) -> Any:
    """What rank 0 wants to know of this rank."""
    if "configuration" in question:
        values = configuration(args)
        return {path: [value, args.origin(path)] for path, value in values.items()}
    if "code" in question:
        return {"package": str(PACKAGE), "files": sources()}
    return _look_for(Path(question["probe"]))


def _library_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys([*ours, *theirs])
    return [
        f"{name} {theirs.get(name, 'not installed')} against {ours.get(name, 'not installed')}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def configuration_differences(theirs: Mapping[str, Sequence[str]], ours: Mapping[str, Sequence[str]]) -> list[str]:
    """In words, of (value, place) by path; what was written, without what follows from it, if anything was."""
    unset = ("unset", "default")
    differ = [
        (path, theirs.get(path, unset), ours.get(path, unset))
        for path in dict.fromkeys([*ours, *theirs])
        if theirs.get(path, unset)[0] != ours.get(path, unset)[0]
    ]
    made = ("default", "derived")
    written = [row for row in differ if row[1][1] not in made or row[2][1] not in made]
    return [
        f"{path} is {_short(there[0])} ({there[1]}) against {_short(here[0])} ({here[1]})"
        for path, there, here in written or differ
    ]


def code_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """In words, of {"package": folder, "files": digest by name}."""
    names = sorted({*theirs["files"], *ours["files"]})
    lines = []
    for name in names:
        there, here = theirs["files"].get(name), ours["files"].get(name)
        if there != here:
            lines.append(f"{name} {'differs' if there and here else 'is only there' if there else 'is missing there'}")
    if theirs["package"] != ours["package"]:
        lines[0] = f"{theirs['package']} is not {ours['package']}: {lines[0]}"
    return lines


def _probe(
    rendezvous: Rendezvous, folder: Path, ranks: Sequence[int], cards: Sequence[Mapping[str, Any]]
) -> str | None:
    """Whether the first ranks of other machines see a file that this one writes; what is wrong, in words."""
    file = folder.resolve() / f".probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as problem:
        return f"save: {folder} cannot be written on host {rendezvous.host} ({problem.strerror}); set another save"
    # Asked for by the path as configured: a relative one must lead to the same place.
    try:
        seen = rendezvous.ask({"probe": str(folder / file.name)}, ranks)
    finally:
        file.unlink(missing_ok=True)
    blind = [rank for rank in ranks if not seen[rank]["seen"]]
    if not blind:
        return None
    there = seen[blind[0]]["folder"]
    return (
        f"save: {folder} is not one folder for all machines: what rank 0 wrote into {folder.resolve()} (host "
        f"{rendezvous.host}) is not in {there} of {named(blind)} (host {_hosts(cards, blind)}); save on storage that "
        "every machine mounts there, or s3://BUCKET/FOLDER"
    )


def _look_for(file: Path) -> dict[str, Any]:
    end = time.monotonic() + _PROBE_S
    while not (seen := file.exists()) and time.monotonic() < end:
        time.sleep(0.1)
        if file.parent.is_dir():
            os.listdir(file.parent)  # a network file system looks anew
    return {"seen": seen, "folder": str(file.parent.resolve())}


def _hosts(cards: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(cards[rank]["host"] for rank in ranks))
    return ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else "")


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
