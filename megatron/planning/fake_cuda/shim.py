"""The shared library that gives torch a CUDA device for fake tensors: built once, loaded before torch."""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def compiler() -> str | None:
    """The path of a C++ compiler (`CXX`, else g++ or clang++); None where there is none."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def lacking() -> str | None:
    """Why there can be no fake CUDA here; None where there can."""
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "fake CUDA needs a CPU build of torch; a CUDA build registers its own hooks in their place"
    return "fake CUDA needs a C++ compiler (CXX, g++ or clang++)" if compiler() is None else None


def build() -> Path:
    """The library for this torch, compiled for who asks first. Raises RuntimeError with what is lacking."""
    compiler_path = compiler()
    if (reason := lacking()) is not None or compiler_path is None:
        raise RuntimeError(reason)
    torch = _torch_folder()
    version = importlib.metadata.version("torch") + sys.implementation.cache_tag
    key = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neox" / "fake_cuda"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{key}.so"
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            arguments = ["-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", f"-L{torch}/lib"]
            command = [compiler_path, *arguments, str(SOURCE), "-o", str(unfinished), "-lc10", "-ltorch_cpu"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
            unfinished.rename(library)
    return library


def preload(library: Path) -> None:
    """Load the library. Raises RuntimeError where torch was imported before, which would not see it."""
    if "torch" in sys.modules:
        raise RuntimeError(f"{library} must be loaded before torch is imported")
    for path in (_torch_folder() / "lib" / "libc10.so", _torch_folder() / "lib" / "libtorch_cpu.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _torch_folder() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
