"""Reads the data sheets of GPUs (gpus.toml), for shares of a peak and for plans."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """A data sheet.

    memory: GiB. bf16, fp8: TFLOP/s of dense matrix products; fp8 0: none. bandwidth: GB/s of the memory.
    power: W, at most. generation: ampere, ada, hopper or blackwell. link: between GPUs of a machine. network:
        between machines, if nothing else is said. fp32: TFLOP/s without tensor cores; 0: unknown.
    """

    memory: float
    bf16: float
    fp8: float
    bandwidth: float
    power: float
    multiprocessors: int
    generation: str
    link: str
    network: str
    source: str
    fp32: float = 0.0


def gpu_named(name: str) -> Gpu | None:
    """Returns the GPU that torch or nvidia-smi calls `name`, such as "NVIDIA H100 80GB HBM3"; None if it is
    unknown."""
    words = set(name.lower().replace("-", " ").split())
    if "h100" in words and words & {"pcie", "nvl"}:
        return None  # other peaks than an SXM card's
    return next((gpu for key, gpu in read_gpus().items() if words >= set(key.split("-"))), None)


def read_gpus() -> Mapping[str, Gpu]:
    """Returns the GPUs by name, in lower case."""
    text = Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
    return {name: Gpu(**values) for name, values in tomllib.loads(text).items()}
