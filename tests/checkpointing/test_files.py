"""Tensor files: checksums, what is allowed inside, and what is refused without being run."""

import hashlib
import os
import pickle
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpointing import CheckpointError, load_tensors, save_tensors, write_bytes
from megatron.checkpointing.tensor_files import BackgroundCalls, BackgroundSync
from tests.checkpointing.golden import fails
from tests.stand_ins import modules


def test_record_is_of_the_bytes_on_disk(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.randn(300, 700), "b": torch.arange(5, dtype=torch.bfloat16), "n": 3}
    record = save_tensors(state, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    assert (record.name, record.size, record.sha256) == ("x.pt", len(data), hashlib.sha256(data).hexdigest())
    for loaded in (load_tensors(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)):
        assert torch.equal(loaded["a"], state["a"]) and torch.equal(loaded["b"], state["b"]) and loaded["n"] == 3
    assert write_bytes(b"seed: 1\n", tmp_path / "c.yml", "configs/c.yml").name == "configs/c.yml"


def test_unwritable_file_is_named(tmp_path: Path) -> None:
    fails("nowhere", save_tensors, {}, tmp_path / "nowhere" / "x.pt")
    if Path("/dev/full").exists():
        fails("cannot be written", save_tensors, {"a": torch.zeros(100_000)}, "/dev/full")


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def test_code_in_a_file_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    torch.save({"a": Evil(target)}, tmp_path / "zip.pt")
    torch.save({"a": Evil(target)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"a": Evil(target)}, protocol=2))
    for name in ("zip.pt", "old.pt", "raw.pt"):
        fails(rf"{name}.*system", load_tensors, tmp_path / name)
    assert not target.exists()


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    save_tensors({"a": torch.randn(1000)}, tmp_path / "good.pt")
    data = (tmp_path / "good.pt").read_bytes()
    bad = {"short.pt": data[:-200], "empty.pt": b"", "text.pt": b"hello world", "head.pt": data[:50]}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        fails(name, load_tensors, tmp_path / name)
    fails("no such file", load_tensors, tmp_path / "absent.pt")


def test_rng_state_of_numpy_1(tmp_path: Path) -> None:
    """NeoX pins numpy below 2, whose module has another name in the pickle."""
    state: Any = np.random.RandomState(7).get_state()
    torch.save({"np_rng_state": state}, tmp_path / "two.pt")
    with zipfile.ZipFile(tmp_path / "two.pt") as numpy_2, zipfile.ZipFile(tmp_path / "one.pt", "w") as numpy_1:
        for name in numpy_2.namelist():
            numpy_1.writestr(name, numpy_2.read(name).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert b"numpy._core" not in (tmp_path / "one.pt").read_bytes()
    for name in ("two.pt", "one.pt"):
        loaded = load_tensors(tmp_path / name)["np_rng_state"]
        assert loaded[0] == "MT19937" and np.array_equal(loaded[1], state[1])


def test_deepspeed_classes_without_deepspeed(tmp_path: Path) -> None:
    module = "deepspeed.utils.tensor_fragment"

    class fragment_address:  # noqa: N801 (DeepSpeed's name)
        def __init__(self, numel: int, start: int) -> None:
            self.numel, self.start = numel, start

    fragment_address.__module__, fragment_address.__qualname__ = module, "fragment_address"
    with modules({"deepspeed": {}, "deepspeed.utils": {}, module: {"fragment_address": fragment_address}}):
        torch.save({"x": fragment_address(3, 4)}, tmp_path / "x.pt")
    stand_in = load_tensors(tmp_path / "x.pt")["x"]
    assert (stand_in.numel, stand_in.start) == (3, 4) and type(stand_in) is not fragment_address
    real = load_tensors(tmp_path / "x.pt", extra_safe=[fragment_address])["x"]
    assert type(real) is fragment_address and real.start == 4


def test_files_are_synced_and_functions_called_beside_and_their_problems_told(tmp_path: Path) -> None:
    done: list[int] = []
    with BackgroundCalls() as background:
        for i in range(20):
            background(partial(done.append, i))
    assert done == list(range(20))
    for later_calls in ([], [partial(done.append, 99)]):
        with pytest.raises(ZeroDivisionError), BackgroundCalls() as background:
            for work in (lambda: done.append(1 // 0), *later_calls):
                background(work)
    assert 99 not in done
    with BackgroundSync() as to_disk:
        save_tensors({"a": torch.ones(3)}, tmp_path / "x.pt", to_disk=to_disk)
    with pytest.raises(CheckpointError, match="gone.pt: cannot be written"), BackgroundSync() as to_disk:
        to_disk(tmp_path / "gone.pt")
    with pytest.raises(KeyboardInterrupt), BackgroundSync() as to_disk:
        to_disk(tmp_path / "gone.pt")
        raise KeyboardInterrupt
