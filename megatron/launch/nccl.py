"""Which NCCL a run preloads: torch's own, or one of the machine that is not older than the one torch was
built with.

    eval "$(python -m megatron.launch.nccl)"        # sets NCCL_LIBRARY and LD_PRELOAD, and says which on stderr

An older one ends in `undefined symbol: ncclCommShrink` when torch is imported, so nothing here imports torch
before that is known.
"""  # noqa: W505 (lines to copy)

import importlib.util
import mmap
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.launch.environment import LaunchError
from megatron.process import run_command

_NAME = "libnccl.so.2"
Version = tuple[int, ...]


@dataclass(frozen=True)
class Nccl:
    """One NCCL. version: None where it cannot be told; file: None where it is part of torch's own
    libraries."""

    version: Version | None
    file: str | None = None

    def __str__(self) -> str:
        return ".".join(map(str, self.version)) if self.version else "unknown"


@dataclass(frozen=True)
class NcclChoice:
    """preload: the file to preload, if any; description: which it is and why, in one line."""

    preload: str | None
    description: str


def choose(built_with: Nccl | None, site: Nccl | None) -> NcclChoice:
    """The NCCL of a run, by versions.

    built_with: torch's own, None where torch knows no CUDA; site: what a module or NCCL_LIBRARY brings.
    """
    if built_with is None:
        return NcclChoice(None, "none: there is no torch with CUDA")
    note = ""
    if site is not None and site.file != built_with.file:
        if site.version and built_with.version and site.version >= built_with.version:
            return NcclChoice(site.file, f"{site}, this machine's ({site.file}); torch was built with {built_with}")
        comparable = site.version and built_with.version
        reason = "is older than the one torch was built with" if comparable else "cannot be compared"
        note = f"; {site} of this machine ({site.file}) {reason} and is left out"
    return NcclChoice(built_with.file, f"{built_with}, torch's own ({built_with.file or 'within its libraries'}){note}")


def own_nccl() -> Nccl | None:
    """torch's own NCCL: the library that its wheel brought, else what it says it was built with; None without
    torch or CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    libraries = Path(spec.origin).parent / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        return None
    brought = [
        libraries / _NAME,
        *(file for place in sys.path for file in Path(place).glob(f"nvidia/*/lib/{_NAME}")),
    ]
    file = next((file for file in brought if file.exists()), None)
    if file is not None:
        return Nccl(read_version(file), str(file))
    try:  # built from source, or linked into torch
        import torch

        return Nccl(tuple(torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except Exception:  # whatever a torch that cannot be loaded says: the doctor and the run will show it
        return Nccl(None)


def site_nccl(env: Mapping[str, str]) -> Nccl | None:
    """This machine's NCCL: that of NCCL_LIBRARY, of LD_PRELOAD, or the first on LD_LIBRARY_PATH, where
    modules put it.

    Raises LaunchError where NCCL_LIBRARY names no file.
    """
    named = env.get("NCCL_LIBRARY")
    if named and not Path(named).is_file():
        raise LaunchError(f"NCCL_LIBRARY={named} is no file; load the module it belongs to, or unset it")
    folders = filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))
    files = [named, *preloaded(env)[0], *(os.path.join(folder, _NAME) for folder in folders)]
    file = next((file for file in files if file and Path(file).is_file()), None)
    return Nccl(read_version(file), file) if file else None


def preloaded(env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The libraries of LD_PRELOAD: those that are NCCL, and the others."""
    files = [file for file in re.split("[ :]+", env.get("LD_PRELOAD", "")) if file]
    nccl = [file for file in files if Path(file).name.startswith("libnccl.so")]
    return nccl, [file for file in files if file not in nccl]


def read_version(file: str | Path) -> Version | None:
    """What a libnccl says it is: the text `NCCL version 2.28.9+cuda12.9` stands in each. It is not loaded:
    that takes a GPU's driver in some releases."""
    try:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = re.search(rb"NCCL version (\d+)\.(\d+)\.(\d+)", content)
            return tuple(map(int, match.groups())) if match else None
    except (OSError, ValueError):  # ValueError: an empty file
        return None


def main() -> int:
    """Print what a shell has to do, and on stderr which NCCL it is; 1 where NCCL_LIBRARY names no file."""
    try:
        choice = choose(own_nccl(), site_nccl(os.environ))
    except LaunchError as problem:
        sys.stderr.write(f"error: {problem}\n")
        return 1
    libraries = [*([choice.preload] if choice.preload else []), *preloaded(os.environ)[1]]
    for name, value in (("NCCL_LIBRARY", choice.preload), ("LD_PRELOAD", ":".join(libraries))):
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n" if value else f"unset {name}\n")
    sys.stderr.write(f"NCCL: {choice.description}\n")
    return 0


if __name__ == "__main__":
    run_command(main)
