"""Reads the data sheets of GPUs (gpus.toml)."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """memory: GB. bf16, fp8: TFLOP/s of dense matrix products; fp8 0: none. bandwidth: GB/s of the memory."""

    memory: float
    bf16: float
    fp8: float
    bandwidth: float
    source: str


def read_gpus() -> Mapping[str, Gpu]:
    """Returns the GPUs by name, in lower case."""
    text = Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
    return {name: Gpu(**values) for name, values in tomllib.loads(text).items()}
