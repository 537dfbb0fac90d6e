"""Ranks that are not alike, or do not share a folder, are told so by name."""

import hashlib
import logging
import os
import re
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


def startup_problem(
    rank: int, world_size: int, keys: dict[int, dict[str, Any]] | None = None,
    patches: dict[int, dict[str, Any]] | None = None, folders: dict[int, str] | None = None, shared: str | None = None,
) -> str | None:  # fmt: skip
    """Returns the error that this rank raises, or None.

    By rank: keys, functions of startup_checks.py by results, folders."""
    startup_checks._PROBE_S = 2.0
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


def test_another_configuration_is_told_by_key_value_and_place() -> None:
    """Not what may differ between machines."""
    machine_keys = {"log_dir": "/tmp/b", "master_addr": "b", "hostfile": "hosts.b", "num_gpus": 2}
    assert run_ranks(startup_problem, 3, {2: machine_keys}, init=False) == [None] * 3
    other_optimizer = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    texts = run_ranks(
        startup_problem,
        4,
        {2: other_optimizer, 3: other_optimizer, 1: {"hidden_dropout": 0.5, "num_layers": 3}},
        init=False,
    )
    assert len(set(texts)) == 1, "all ranks are told the same"
    first_line, second_line = texts[0].splitlines()
    assert re.search(rf"^rank 1 \(host {HOST}\) .*rank 0 \(host {HOST}\).*configuration", first_line)
    assert re.search(r"num_layers .*3 \(program\).* 2 \(program\)", first_line)
    assert re.search(r"hidden_dropout .*0\.5 \(program\).* 0\.0 \(default\)", first_line)
    assert re.search(
        rf"^ranks 2-3 \(host {HOST}\).*configuration.*optimizer\.params\.lr .*0\.0001 .*0\.0002 ", second_line
    )


def test_other_code_and_libraries_are_reported() -> None:
    digests = startup_checks.source_digests(script="")
    changed = {**digests, "megatron/mpu/groups.py": "0", "megatron/new.py": "1"}
    del changed["megatron/mpu/layers.py"]
    versions = {**startup_checks.library_versions(), "torch": "2.0.1", "NCCL": "2.26.6"}
    patches = {0: {"source_digests": digests}, 1: {"source_digests": changed, "library_versions": versions}}
    libraries, code = run_ranks(startup_problem, 2, None, patches, init=False)[0].splitlines()
    torch = startup_checks.library_versions()["torch"]
    assert re.search(rf"libraries.*torch 2\.0\.1.*{re.escape(torch)}.*NCCL 2\.26\.6.*not installed", libraries)
    assert re.search(
        r"code.*mpu/groups\.py differs.*mpu/layers\.py is only on rank 0.*megatron/new\.py is missing on rank 0", code
    )


def test_a_file_that_has_changed_meanwhile_is_reported() -> None:
    local, remote = ({"package": folder, "files": {"train.py": "0"}} for folder in ("/a", "/b"))
    assert len(startup_checks.code_differences(local, local)) == 1
    (line,) = startup_checks.code_differences(remote, local)
    assert "/a" in line and "/b" in line


def test_sources_are_the_files_of_the_package_and_the_script(tmp_path: Path) -> None:
    shutil.copytree(startup_checks.PACKAGE, tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "run.py").write_text("1")
    copy = startup_checks.source_digests(tmp_path / "megatron", str(tmp_path / "run.py"))
    assert copy.pop("run.py") == hashlib.sha256(b"1").hexdigest()
    digests = startup_checks.source_digests()
    assert {k: v for k, v in digests.items() if k.startswith("megatron/")} == copy
    (tmp_path / "megatron" / "mpu" / "groups.py").write_text("")
    changed = startup_checks.source_digests(tmp_path / "megatron", "")
    assert [name for name, digest in copy.items() if changed[name] != digest] == ["megatron/mpu/groups.py"]


def test_one_folder_for_all_machines_is_proved_by_a_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert run_ranks(startup_problem, 3, None, None, {0: a, 1: a, 2: a}, "run", init=False) == [None] * 3
    texts = run_ranks(startup_problem, 3, None, None, {0: a, 1: b, 2: a}, "run", init=False)
    assert len(set(texts)) == 1 and texts[0] is not None
    assert re.search(rf"^save: run .*rank 0 .*{a}/run.* {b}/run .*rank 1 \(host {HOST}\)", texts[0])
    assert os.listdir(tmp_path / "a" / "run") == [], "the probe file is gone"
    (tmp_path / "file").touch()
    folders = {0: str(tmp_path), 1: str(tmp_path)}
    text = run_ranks(startup_problem, 2, None, None, folders, "file/run", init=False)[1]
    assert re.search(rf"save: file/run .*{HOST} \(Not a directory\)", str(text))
