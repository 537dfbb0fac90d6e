"""Chooses the NCCL that a run preloads: torch's own, or the machine's if that is not older.

    eval "$(python -m megatron.launch.nccl)"        # sets NCCL_LIBRARY and LD_PRELOAD; stderr describes the choice

With an NCCL older than torch's, `import torch` fails with `undefined symbol: ncclCommShrink`. So this module
imports torch only if it finds no file from which to read the version of torch's NCCL.
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
    """An NCCL library.

    version: None if it is unknown.
    file: None if the library is linked into torch.
    """

    version: Version | None
    file: str | None = None

    def __str__(self) -> str:
        return ".".join(map(str, self.version)) if self.version else "unknown"


@dataclass(frozen=True)
class NcclChoice:
    """The NCCL to use.

    preload: the library to name in LD_PRELOAD; None: preload nothing.
    description: the chosen NCCL and the reason, in one line.
    """

    preload: str | None
    description: str


def choose(torch_nccl: Nccl | None, site: Nccl | None) -> NcclChoice:
    """Chooses the NCCL of a run: the machine's if it is at least as new as torch's, else torch's.

    torch_nccl: torch's own; None for a torch without CUDA.
    site: this machine's (`site_nccl`); None if it has none.
    """
    if torch_nccl is None:
        return NcclChoice(None, "none, because torch is not installed or is built without CUDA")
    note = ""
    if site is not None and site.file != torch_nccl.file:
        if site.version and torch_nccl.version and site.version >= torch_nccl.version:
            return NcclChoice(site.file, f"{site}, this machine's ({site.file}); torch was built with {torch_nccl}")
        comparable = site.version and torch_nccl.version
        reason = "is older than the one torch was built with" if comparable else "cannot be compared"
        note = f"; {site} of this machine ({site.file}) {reason} and is not used"
    return NcclChoice(torch_nccl.file, f"{torch_nccl}, torch's own ({torch_nccl.file or 'within its libraries'}){note}")


def own_nccl() -> Nccl | None:
    """Returns the NCCL that torch was installed with: the file in its wheel, or the version that torch
    reports.

    Returns None if torch is not installed or is built without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    libraries = Path(spec.origin).parent / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        return None
    in_wheels = (file for place in sys.path for file in Path(place).glob(f"nvidia/*/lib/{_NAME}"))
    file = next((file for file in (libraries / _NAME, *in_wheels) if file.exists()), None)
    if file is not None:
        return Nccl(read_version(file), str(file))
    try:  # built from source, or linked into torch
        import torch

        return Nccl(tuple(torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except Exception:  # torch cannot be imported; the doctor and the run show why
        return Nccl(None)


def site_nccl(env: Mapping[str, str]) -> Nccl | None:
    """Returns this machine's NCCL: from NCCL_LIBRARY, else LD_PRELOAD, else the first on LD_LIBRARY_PATH;
    None if there is none.

    Raises LaunchError if NCCL_LIBRARY is not a file.
    """
    library = env.get("NCCL_LIBRARY")
    if library and not Path(library).is_file():
        raise LaunchError(f"NCCL_LIBRARY={library} is not a file; load the module it belongs to, or unset it")
    folders = filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))
    files = [library, *preloaded(env)[0], *(os.path.join(folder, _NAME) for folder in folders)]
    file = next((file for file in files if file and Path(file).is_file()), None)
    return Nccl(read_version(file), file) if file else None


def preloaded(env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns the libraries in LD_PRELOAD as (NCCL libraries, all others)."""
    files = [file for file in re.split("[ :]+", env.get("LD_PRELOAD", "")) if file]
    nccl = [file for file in files if Path(file).name.startswith("libnccl.so")]
    return nccl, [file for file in files if file not in nccl]


def read_version(file: str | Path) -> Version | None:
    """Returns the version of a libnccl, from the text `NCCL version 2.28.9+cuda12.9` in the file.

    The library is not loaded, because some releases need a GPU driver for that.
    """
    try:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = re.search(rb"NCCL version (\d+)\.(\d+)\.(\d+)", content)
            return tuple(map(int, match.groups())) if match else None
    except (OSError, ValueError):  # ValueError: an empty file
        return None


def main() -> int:
    """Prints shell commands that set NCCL_LIBRARY and LD_PRELOAD to the chosen NCCL, and describes the choice
    on stderr.

    Returns 1 if NCCL_LIBRARY is not a file.
    """
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
