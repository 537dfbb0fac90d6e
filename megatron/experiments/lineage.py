"""The family of a run: the checkpoint from which it was branched, that run's own parent, and its branches."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing import Manifest, find_checkpoint, list_checkpoints, read_manifest
from megatron.checkpointing.manifest import MANIFEST
from megatron.data.files import sha256
from megatron.experiments.errors import RunError
from megatron.neox_arguments.values.integers import parse_integer
from megatron.neox_arguments.values.json_text import parse_json
from megatron.neox_arguments.values.remote_paths import is_remote

PARENT_FILE = "parent.json"  # in the `save` of a branch
LATEST_STEP = "latest"


@dataclass(frozen=True)
class Parent:
    """A checkpoint of a run, from which another one begins. digest: SHA-256 of its manifest.json."""

    run: Path
    checkpoint: Path
    manifest: Manifest
    digest: str

    @property
    def family(self) -> Mapping[str, Any] | None:
        """The parent's own `branched_from`; None if it is no branch."""
        return self.manifest.config.get("branched_from")


def split_source(source: str) -> tuple[Path, int | None]:
    """Returns (folder of checkpoints, step) of RUN@STEP; None for the step `latest`. Raises RunError."""
    name, separator, step = source.rpartition("@")
    if is_remote(name or step):
        raise RunError(f"{source}: is remote; copy the checkpoint to a folder of this machine first")
    run = Path(name if separator else source)
    if not run.is_dir():
        raise RunError(f"{run}: no such folder; name a run's folder of checkpoints (save) and a step: RUN@STEP")
    number = parse_integer(step)
    if not separator or number is None and step != LATEST_STEP:
        steps = ", ".join(path.name.removeprefix("global_step") for path in list_checkpoints(run)) or "none"
        raise RunError(f"{source}: name a step, as in {run}@{LATEST_STEP}; it holds: {steps}")
    return run.resolve(), number


def read_parent(run: Path, step: int | None) -> Parent:
    """Returns a run's checkpoint. step: None: the one that `latest` names. Raises CheckpointError."""
    checkpoint = find_checkpoint(run, step)
    manifest = read_manifest(checkpoint)
    if manifest is None or not manifest.config:
        raise RunError(
            f"{checkpoint}: does not hold the configuration of its run, as GPT-NeoX's checkpoints; set load and "
            "iteration in a configuration of your own, and start it with train.py"
        )
    return Parent(run, checkpoint, manifest, sha256(checkpoint / MANIFEST))


def read_record(save: Path) -> dict[str, Any] | None:
    """Returns the content of a branch's parent.json; None if there is none. Raises RunError if it is
    damaged."""
    file = save / PARENT_FILE
    if not file.is_file():
        return None
    try:
        record = parse_json(file.read_text(encoding="utf-8"))
        str(record["run"]), int(record["iteration"]), str(record["digest"]), dict(record["settings"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(f"{file}: is damaged ({problem}); remove it, or name another save") from problem
    return record


def _family_of(run: Path) -> Mapping[str, Any] | None:
    """Returns the `branched_from` of a run, from parent.json or its last checkpoint. None if it is no
    branch."""
    record = read_record(run)
    if record is not None:
        return record
    checkpoints = list_checkpoints(run)
    manifest = read_manifest(checkpoints[-1]) if checkpoints else None
    return None if manifest is None else manifest.config.get("branched_from")


def ancestors(family: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Returns the `branched_from` of a run, of its parent, and so on."""
    chain = []
    while family is not None:
        chain.append(family)
        family = family.get("parent")
    return chain


def words_of(changed: Mapping[str, Any] | None) -> list[str]:
    """Returns the keys that differ as `key: old -> new`."""
    pairs = ((key, *values) for key, values in (changed or {}).items())
    return [f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, old, new in pairs]


def tree_lines(run: Path) -> list[str]:
    """Returns the family of a run as text: the first run, and below each run its branches.

    Branches are found in the folders beside the runs that are families. Raises CheckpointError.
    """
    run = run.resolve()
    family = _family_of(run)
    if family is None and not list_checkpoints(run):
        raise RunError(f"{run}: is no run: it holds neither checkpoints nor {PARENT_FILE}")
    chain = ancestors(family)
    families: dict[Path, Mapping[str, Any]] = {} if family is None else {run: family}
    for child, parent in zip(chain, chain[1:], strict=False):
        families[Path(child["run"])] = parent
    damaged: list[str] = []
    folders = {path.parent for path in (run, *(Path(member["run"]) for member in chain))}
    for file in sorted(path for folder in folders for path in folder.glob(f"*/{PARENT_FILE}")):
        try:
            record = read_record(file.parent)
        except RunError as problem:  # another run's: it is left out, with a line
            damaged.append(f"left out: {problem}")
            continue
        if record is not None:
            families.setdefault(file.parent.resolve(), record)
    root = Path(chain[-1]["run"]) if chain else run
    return [str(root) + ("  <-" if root == run else ""), *_branch_lines(root, run, families, ""), *damaged]


def _branch_lines(
    parent: Path, requested: Path, families: Mapping[Path, Mapping[str, Any]], indent: str
) -> Iterator[str]:
    children = [(family["iteration"], path) for path, family in families.items() if Path(family["run"]) == parent]
    for step, path in sorted(children):
        family = families[path]
        yield f"{indent}  step {step}: {path}{'  <-' if path == requested else ''}"
        yield f"{indent}      manifest {family['digest'][:12]}, data {family['data']}"
        yield from (f"{indent}      {words}" for words in words_of(family.get("changed")))
        yield from _branch_lines(path, requested, families, indent + "  ")
