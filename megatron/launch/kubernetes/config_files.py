"""Checks the configuration of a run for its number of ranks, and prepares the texts of its files for the
pods."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

from megatron.launch.kubernetes.site import Site
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.neox_args import NeoXArgs, load
from megatron.neox_arguments.reading.presets import files_of
from megatron.neox_arguments.values.remote_paths import is_remote

FOLDER = PurePosixPath("/etc/neox")
"""The folder of the files in the pods."""
_MOST_BYTES = 1_000_000  # of a ConfigMap, which has a place in etcd
_PATIENCE_S = 1800  # for pods that wait for a node, or for their image
_READ = ("load", "vocab_file", "merge_file", "system_prompt_file", "data_path")
# How ranks are started: in pods the operator says it.
_STARTING = (
    "hostfile", "include", "exclude", "num_gpus", "num_nodes", "master_addr", "master_port", "launcher",
    "deepspeed_mpi", "deepspeed_slurm", "force_multi",
)  # fmt: skip


@dataclass(frozen=True)
class PodConfig:
    """The configuration of a run in pods.

    files: text of each configuration file by its name in FOLDER, in the order in which they are merged.
    settings: KEY=VALUE that override the files.
    metrics_port: port of rank 0's metrics; None: no metrics.
    notes: one line for each folder that the run reads and that no claim (volume) contains.
    """

    files: Mapping[str, str]
    settings: tuple[str, ...]
    metrics_port: int | None
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Returns the command of each pod. It runs in the folder of the image that holds deepy.py."""
        files = [str(FOLDER / name) for name in self.files]
        return ["python", "deepy.py", "train.py", *files, *(["--set", *self.settings] if self.settings else [])]


def pod_config(
    files: Sequence[str], site: Site, settings: Sequence[str] = (), preset_root: Path | None = None
) -> PodConfig:
    """Returns the configuration that `files` and `settings` (KEY=VALUE) give in the pods of a site.

    `${NAME}` in the files is kept, and the pods replace it. The check here uses the pods' values of NAME, not
    those of this machine. preset_root: the folder of the presets.

    Raises ConfigError for settings that cannot run on this number of ranks or in pods.
    """
    paths, _ = files_of(files, preset_root=preset_root)
    texts = {path: _read(path) for path in paths}
    with _environment_of(site):
        args = load(paths, list(settings)).check_training()
        args.for_world(site.world_size)
    problems = [
        f"{args.origin(key)}: {key}: the operator says how ranks are started in pods; remove it"
        for key in _STARTING
        if args.origin(key) not in ("default", "derived")
    ]
    problems += _not_for_pods(args, site)
    if problems:
        raise ConfigError(problems)
    port = args.metrics_port if args.metrics_port is not None else site.metrics_port or None
    overrides = [] if args.origin("rendezvous_timeout_s") != "default" else [f"rendezvous_timeout_s={_PATIENCE_S}"]
    # Pods start again as a whole; ranks that did so on their own would wait for a pod that begins anew.
    overrides += ["max_restarts=0"] if args.max_restarts else []
    if port is not None:
        overrides += [f"metrics_port={port}"] if args.metrics_port is None else []
        overrides += ["metrics_host=0.0.0.0"] if args.origin("metrics_host") == "default" else []
    return PodConfig(_unique_names(texts), (*settings, *overrides), port, tuple(_in_the_image(args, site)))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError([f"{path}: cannot be read: {problem}"]) from None


def _unique_names(texts: Mapping[str, str]) -> dict[str, str]:
    """Returns the texts by file name, without the folder. If two names are equal, every name gets a number in
    front.

    Raises ConfigError if the texts are too large for a ConfigMap.
    """
    names = [Path(path).name for path in texts]
    if sum(len(text.encode()) for text in texts.values()) > _MOST_BYTES:
        raise ConfigError([f"{', '.join(texts)}: together larger than {_MOST_BYTES:,} bytes, the limit of a ConfigMap"])
    if len(set(names)) < len(names):
        names = [f"{i}-{name}" for i, name in enumerate(names, start=1)]
    return dict(zip(names, texts.values(), strict=True))


def _in_the_image(args: ModelArgs, site: Site) -> Iterator[str]:
    """Yields a note for each folder that the run reads and that no claim (volume) of the site contains.

    Either the image contains the folder (target `baked`), or a claim was forgotten.
    """
    keys: dict[str, list[str]] = {}
    for key in (*_READ, *(key.name for key in fields(args) if key.name.endswith("data_paths"))):
        value = getattr(args, key)
        for path in [value] if isinstance(value, str) else value or ():
            if path.startswith("/") and not _on_a_claim(path, site):
                keys.setdefault(str(PurePosixPath(path).parent), []).append(key)
    for folder, names in keys.items():
        yield (
            f"{folder} ({', '.join(dict.fromkeys(names))}) is on no claim of the site: either it is in the image "
            f"(--target baked), or add a claim that has it"
        )


def _on_a_claim(path: str, site: Site) -> bool:
    return is_remote(path) or any(PurePosixPath(path).is_relative_to(folder) for folder in site.volumes().values())


def _not_for_pods(args: NeoXArgs, site: Site) -> Iterator[str]:
    """Yields a problem for each setting with which the run would be lost or sent back when a pod is lost."""
    folders = ", ".join(site.volumes().values()) or "it has none"
    if args.save is None:
        yield "save: is not set, so a lost pod would lose the run; set it to a folder of a claim, as ${OUTPUT_DIR}"
    elif not _on_a_claim(args.save, site):
        place = f"{args.origin('save')}: save: {args.save}"
        yield f"{place} is in no claim of the site ({folders}), so it would be lost with its pod"
    for key in ("restart", "iteration"):
        if args.origin(key) not in ("default", "derived"):
            yield f"{args.origin(key)}: {key}: would send the run back whenever a pod is lost; remove it"


@contextmanager
def _environment_of(site: Site) -> Iterator[None]:
    """Within the block os.environ has the variables of the site's pods and no others."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(site.environment() | dict.fromkeys(site.secrets, "(secret)"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
