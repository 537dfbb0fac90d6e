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
"""The folder in which pods find the configuration files."""
_MOST_BYTES = 1_000_000  # limit of a ConfigMap, which etcd stores
_PATIENCE_S = 1800  # to wait for pods that wait for a node, or for their image
_READ = ("load", "vocab_file", "merge_file", "system_prompt_file", "data_path")
# Keys that say how ranks are started; in pods the operator decides this.
_STARTING = (
    "hostfile", "include", "exclude", "num_gpus", "num_nodes", "master_addr", "master_port", "launcher",
    "deepspeed_mpi", "deepspeed_slurm", "force_multi",
)  # fmt: skip


@dataclass(frozen=True)
class PodConfig:
    """The configuration of a run in Kubernetes pods.

    files: text of each configuration file by its name in FOLDER, in the order in which they are merged.
    settings: overrides of the files, each as KEY=VALUE.
    metrics_port: port of rank 0's metrics; None: no metrics.
    notes: one line for each folder that the run reads and that no claim (volume) contains.
    """

    files: Mapping[str, str]
    settings: tuple[str, ...]
    metrics_port: int | None
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Returns the command that each pod runs, in the folder of the image that holds deepy.py."""
        files = [str(FOLDER / name) for name in self.files]
        return ["python", "deepy.py", "train.py", *files, *(["--set", *self.settings] if self.settings else [])]


def pod_config(
    files: Sequence[str], site: Site, settings: Sequence[str] = (), preset_root: Path | None = None
) -> PodConfig:
    """Returns the configuration that `files` and `settings` (KEY=VALUE) give in the pods of a site.

    `${NAME}` in the files is kept, and the pods replace it by their environment variable NAME. This function
    checks the configuration with the pods' variables, not with those of this machine. preset_root: the folder
    of the presets.

    Raises ConfigError for settings that cannot run in pods or on the site's number of ranks.
    """
    paths, _ = files_of(files, preset_root=preset_root)
    texts = {path: _read(path) for path in paths}
    with _environment_of(site):
        args = load(paths, list(settings)).check_training()
        args.for_world(site.world_size)
    problems = [
        f"{args.origin(key)}: {key}: in pods the operator decides how ranks are started; remove this key"
        for key in _STARTING
        if args.origin(key) not in ("default", "derived")
    ]
    problems += _not_for_pods(args, site)
    if problems:
        raise ConfigError(problems)
    port = args.metrics_port if args.metrics_port is not None else site.metrics_port or None
    overrides = [] if args.origin("rendezvous_timeout_s") != "default" else [f"rendezvous_timeout_s={_PATIENCE_S}"]
    # After a failure pods restart as a whole. Ranks that restarted alone would wait for a pod that restarts.
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
    """Returns the texts by file name without its folder. If two names are equal, every name gets a number as
    a
    prefix: `1-a.yml`.

    texts: contents of files by path. Raises ConfigError if they are too large for a ConfigMap.
    """
    names = [Path(path).name for path in texts]
    if sum(len(text.encode()) for text in texts.values()) > _MOST_BYTES:
        raise ConfigError([
            f"{', '.join(texts)}: together larger than {_MOST_BYTES:,} bytes, the limit of a ConfigMap; shorten them"
        ])  # fmt: skip
    if len(set(names)) < len(names):
        names = [f"{i}-{name}" for i, name in enumerate(names, start=1)]
    return dict(zip(names, texts.values(), strict=True))


def _in_the_image(args: ModelArgs, site: Site) -> Iterator[str]:
    """Yields a note for each folder that the run reads and that is on no claim (volume) of the site.

    Either the image contains this folder (target `baked`), or the site lacks a claim.
    """
    keys: dict[str, list[str]] = {}
    for key in (*_READ, *(key.name for key in fields(args) if key.name.endswith("data_paths"))):
        value = getattr(args, key)
        for path in [value] if isinstance(value, str) else value or ():
            if path.startswith("/") and not _on_a_claim(path, site):
                keys.setdefault(str(PurePosixPath(path).parent), []).append(key)
    for folder, names in keys.items():
        yield (
            f"{folder} ({', '.join(dict.fromkeys(names))}) is on no claim (volume) of the site: build it into the "
            f"image (--target baked), or add a claim that contains it"
        )


def _on_a_claim(path: str, site: Site) -> bool:
    return is_remote(path) or any(PurePosixPath(path).is_relative_to(folder) for folder in site.volumes().values())


def _not_for_pods(args: NeoXArgs, site: Site) -> Iterator[str]:
    """Yields a problem for each setting with which a lost pod would lose the run or send it back to its
    start."""
    folders = ", ".join(site.volumes().values()) or "it has none"
    if args.save is None:
        yield "save: is not set, so a lost pod would lose the run; set it to a folder on a claim, such as ${OUTPUT_DIR}"
    elif not _on_a_claim(args.save, site):
        place = f"{args.origin('save')}: save: {args.save}"
        yield f"{place} is on no claim of the site ({folders}), so a lost pod would lose it; set a folder on a claim"
    for key in ("restart", "iteration"):
        if args.origin(key) not in ("default", "derived"):
            yield f"{args.origin(key)}: {key}: would send the run back whenever a pod is lost and restarts; remove it"


@contextmanager
def _environment_of(site: Site) -> Iterator[None]:
    """Within the block, os.environ holds the variables of the site's pods and no others."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(site.environment() | dict.fromkeys(site.secrets, "(secret)"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
