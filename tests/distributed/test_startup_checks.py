"""Ranks that are not alike, or do not share a folder, are told so by name."""

import hashlib
import logging
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.distributed import StartError, rendezvous_and_check, startup_checks
from megatron.launch import process_info
from tests.model.stages import small
from tests.pool import run_ranks

HOST = socket.gethostname()
ON = {"rendezvous_timeout_s": 10.0, "optimizer": {"type": "Adam", "params": {"lr": 2e-4}}}


def told(
    rank: int,
    world_size: int,
    keys: dict[int, dict[str, Any]] | None = None,
    patches: dict[int, dict[str, Any]] | None = None,
    folders: dict[int, str] | None = None,
    shared: str | None = None,
) -> str | None:
    """What this rank is told; None when it may go on.

    By rank: other keys, functions of startup_checks.py replaced by what they give, a working folder (then
    every rank is a machine of its own).
    """
    startup_checks._PROBE_S = 0.3
    for name, value in (patches or {}).get(rank, {}).items():
        setattr(startup_checks, name, lambda value=value: value)
    args = small(**{**ON, **(keys or {}).get(rank, {})}).for_world(world_size)
    process = process_info()
    if folders is not None:
        os.chdir(folders[rank])
        process = replace(process, local_rank=0, local_world_size=1)
    try:
        store = rendezvous_and_check(args, process, logging.getLogger("tests.quiet"), shared)
    except StartError as problem:
        return str(problem)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    return None


def test_equal_ranks_go_on_whatever_differs_between_machines() -> None:
    machine_keys = {"log_dir": "/tmp/b", "master_addr": "b", "hostfile": "hosts.b", "num_gpus": 2}
    assert run_ranks(told, 3, {2: machine_keys}, init=False) == [None] * 3


def test_another_configuration_is_told_by_key_value_and_place() -> None:
    other = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    texts = run_ranks(told, 4, {2: other, 3: other, 1: {"hidden_dropout": 0.5, "num_layers": 3}}, init=False)
    assert len(set(texts)) == 1, "all ranks are told the same"
    one, two = texts[0].splitlines()
    assert one.startswith(f"rank 1 (host {HOST}) and rank 0 (host {HOST}) differ in configuration: ")
    assert "num_layers is 3 (program) against 2 (program)" in one
    assert "hidden_dropout is 0.5 (program) against 0.0 (default)" in one
    assert two.startswith(f"ranks 2-3 (host {HOST}) and ")
    assert "configuration: optimizer.params.lr is 0.0001 (program) against 0.0002 (program); start all" in two


def test_other_code_and_libraries_are_told() -> None:
    here = startup_checks.source_digests(script="")
    changed = {**here, "megatron/mpu/groups.py": "0", "megatron/new.py": "1"}
    del changed["megatron/mpu/layers.py"]
    patches = {
        0: {"source_digests": here},
        1: {
            "source_digests": changed,
            "library_versions": {**startup_checks.library_versions(), "torch": "2.0.1", "NCCL": "2.26.6"},
        },
    }
    libraries, code = run_ranks(told, 2, None, patches, init=False)[0].splitlines()
    torch = startup_checks.library_versions()["torch"]
    assert f"differ in libraries: torch 2.0.1 against {torch}; NCCL 2.26.6 against not installed; use one" in libraries
    files = "megatron/mpu/groups.py differs; megatron/mpu/layers.py is missing there; megatron/new.py is only there"
    assert f"differ in code: {files}; install the same version" in code


def test_sources_are_the_files_of_the_package_and_the_script(tmp_path: Path) -> None:
    shutil.copytree(startup_checks.PACKAGE, tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "run.py").write_text("1")
    copy = startup_checks.source_digests(tmp_path / "megatron", str(tmp_path / "run.py"))
    assert copy.pop("run.py") == hashlib.sha256(b"1").hexdigest()
    here = startup_checks.source_digests()
    assert {k: v for k, v in here.items() if k.startswith("megatron/")} == copy
    (tmp_path / "megatron" / "mpu" / "groups.py").write_text("")
    assert (
        startup_checks.source_digests(tmp_path / "megatron", "")["megatron/mpu/groups.py"]
        != copy["megatron/mpu/groups.py"]
    )


def test_one_folder_for_all_machines_is_proved_by_a_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert run_ranks(told, 3, None, None, {0: a, 1: a, 2: a}, "run", init=False) == [None] * 3
    texts = run_ranks(told, 3, None, None, {0: a, 1: b, 2: a}, "run", init=False)
    assert len(set(texts)) == 1 and texts[0] is not None
    assert texts[0].startswith(f"save: run is not one folder for all machines: what rank 0 wrote into {a}/run (host ")
    assert f"is not in {b}/run of rank 1 (host {HOST}); save on storage" in texts[0]
    assert os.listdir(tmp_path / "a" / "run") == [], "the probe file is gone"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = {0: str(tmp_path), 1: str(tmp_path)}
    text = run_ranks(told, 2, None, None, folders, "file/run", init=False)[1]
    assert f"save: file/run cannot be written on host {HOST} (Not a directory)" in str(text)
