"""Checks an installation: `LD_PRELOAD=$NCCL_LIBRARY uv run pytest tests/test_uv_install.py -v`."""

import importlib
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PREFIX = Path(sys.prefix).resolve()
IN_VENV = PREFIX.parent == ROOT and PREFIX.name.startswith(".venv")
OTHER_SYSTEMS = {"tzdata", "colorama"}  # needed on other systems only
EXTRAS = {"flash-attn": ("flash_attn", "flash_attn_2_cuda"), "transformer-engine": ("transformer_engine.pytorch",)}


def installed(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


@pytest.mark.skipif(not IN_VENV, reason="this interpreter is none of ours: its versions are its own")
def test_versions_are_those_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    chosen = PREFIX / "constraints.txt"  # with torch as the driver needs it
    if chosen.exists():
        pinned["torch"] = re.findall(r"^torch==([\d.]+)", chosen.read_text(), re.MULTILINE)[0]
    versions = {name: installed(name) for name in pinned}
    missing = {name for name, number in versions.items() if number is None}
    assert missing <= OTHER_SYSTEMS
    assert versions == pinned | dict.fromkeys(missing)


def test_torch_computes():
    assert (torch.arange(6.0).reshape(2, 3) @ torch.ones(3, 1)).flatten().tolist() == [3.0, 12.0]


@pytest.mark.gpu
def test_torch_computes_on_the_gpu():
    assert (torch.arange(6.0, device="cuda").reshape(2, 3) @ torch.ones(3, 1, device="cuda")).sum().item() == 15.0


@pytest.mark.skipif(not os.environ.get("NCCL_LIBRARY"), reason="NCCL_LIBRARY is not set: torch's own is used")
def test_the_nccl_named_is_the_one_in_use():
    library = Path(os.environ["NCCL_LIBRARY"])
    assert library.is_file(), f"NCCL_LIBRARY={library} is not a file"
    loaded = set(re.findall(r"/\S*libnccl\.so\S*", Path("/proc/self/maps").read_text()))
    assert loaded == {str(library.resolve())}, "start with LD_PRELOAD=$NCCL_LIBRARY"


@pytest.mark.parametrize("package", os.environ.get("NEOX_UV_EXTRAS", "").split())
def test_what_was_asked_for_by_a_flag_is_there(package):
    assert installed(package)
    for module in EXTRAS[package]:
        importlib.import_module(module)
