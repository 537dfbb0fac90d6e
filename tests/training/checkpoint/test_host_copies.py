"""Saves beside the steps: page-locked copies (locking is counted here, not done), and failures."""

import io
import json
import mmap
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.checkpointing import verify
from megatron.mpu import ParallelGroups
from megatron.training import train
from megatron.training.checkpoint import host_copies as copies_module
from megatron.training.checkpoint import pieces
from megatron.training.checkpoint import writer as saving
from megatron.training.checkpoint.host_copies import HostCopies, PageLocking, RankMemory, host_copies, lacks_memory
from megatron.training.deepspeed.optimizer_parts import OptimizerParts
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import warnings_of
from tests.training.runs import ADAMW, LAYOUTS, NEOX, begin, cells, config

CPU, PAGE = torch.device("cpu"), mmap.PAGESIZE


@dataclass
class Locks:
    """Memory that is locked, by address; at most `limit` bytes."""

    limit: int = 1 << 40
    sizes: dict[int, int] = field(default_factory=dict)
    tries: int = 0

    def lock(self, address: int, size: int) -> None:
        self.tries += 1
        assert address % PAGE == size % PAGE == 0
        assert all(address + size <= start or start + length <= address for start, length in self.sizes.items())
        if sum(self.sizes.values()) + size > self.limit:
            raise RuntimeError("out of memory (2)\nmore lines")
        self.sizes[address] = size

    def unlock(self, address: int) -> None:
        del self.sizes[address]

    def copies(self) -> HostCopies:
        return HostCopies(CPU, PageLocking(self.lock, self.unlock, lambda: None))


class LateCopies(HostCopies):
    """Copies that arrive no sooner than they are waited for, as from a device that is slow."""

    def __init__(self, locks: Locks) -> None:
        super().__init__(CPU, PageLocking(locks.lock, locks.unlock, self._arrive))
        self._pending: list[tuple[Tensor, Tensor]] = []

    def copy(self, tensor: Tensor) -> Tensor:
        copied = super().copy(tensor)
        self._pending.append((copied, copied.clone()))
        copied.fill_(float("nan") if copied.is_floating_point() else 77)
        return copied

    def _arrive(self) -> None:
        for copied, values in self._pending:
            copied.copy_(values)
        self._pending.clear()


def tensors() -> dict[str, Tensor]:
    """Tensors of several dtypes, not contiguous, views of one storage, tied, empty, and a number."""
    table = torch.randn(33, 70)
    return {
        "fp32": table, "tied": table, "row": table[3], "transposed": table.t(), "every other": table[::2, 1::3],
        "expanded": torch.randn(5, 1).expand(5, 9), "bf16": torch.randn(7, 11).bfloat16(),
        "fp16": torch.randn(3).half(), "fp64": torch.randn(2, 3, 4).double(), "int64": torch.arange(1000),
        "int8": torch.arange(-100, 100, dtype=torch.int8).view(20, 10), "bool": torch.rand(13) > 0.5,
        "step": torch.tensor(4.0), "none": torch.empty(0, 5, dtype=torch.bfloat16), "large": torch.randn(1 << 20),
        "parameter": nn.Parameter(torch.randn(4, 4)),
    }  # fmt: skip


def saved(state: dict[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_copies_are_saved_as_the_same_bytes() -> None:
    locks, sources = Locks(), tensors()
    copies, ordinary = locks.copies(), host_copies(CPU)
    copied = {name: copies.copy(tensor) for name, tensor in sources.items()}
    copies.wait()
    unlocked = {name: ordinary.copy(tensor) for name, tensor in sources.items()}
    ordinary.wait()
    for name, tensor in sources.items():
        for host_tensor in (copied[name], unlocked[name]):
            assert (
                torch.equal(host_tensor, tensor)
                and host_tensor.dtype == tensor.dtype
                and host_tensor.shape == tensor.shape
            ), name
            assert (
                host_tensor.is_contiguous() and host_tensor.storage_offset() == 0 and not host_tensor.requires_grad
            ), name
            assert host_tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, name
        if tensor.numel():
            assert copied[name].data_ptr() in locks.sizes and unlocked[name].data_ptr() not in locks.sizes, name
    assert (
        len({host_tensor.data_ptr() for host_tensor in copied.values() if host_tensor.numel()}) == len(sources) - 1
    ), "none shares memory"
    assert saved(copied) == saved(unlocked)
    for tensor in sources.values():
        tensor.detach().zero_()
    assert saved(copied) == saved(unlocked), "steps change the tensors, not the copies"
    assert ordinary.held == 0


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[1], lambda t: t.view(torch.int32), lambda t: t.numpy()])
def test_no_memory_is_written_over_that_something_reads(keep: Any) -> None:
    """Whatever a writer still has: the copy, a view, other bits of it, an array."""
    copies, source = Locks().copies(), torch.randn(64, 64)
    retained = keep(copies.copy(source))
    old_values = retained.tolist()
    for value in range(4):
        assert torch.equal(copies.copy(torch.full((64, 64), float(value))), torch.full((64, 64), float(value)))
    assert retained.tolist() == old_values and copies.held == 2 * 64 * 64 * 4
    del retained
    assert all(copies.copy(source).numel() for _ in range(4)) and copies.held == 2 * 64 * 64 * 4


def test_no_more_memory_than_was_in_use_at_once() -> None:
    generator, copies = random.Random(3), Locks().copies()
    sizes = [1, PAGE, PAGE + 1, 5 * PAGE]
    peak_counts, live = dict.fromkeys((PAGE, 2 * PAGE, 5 * PAGE), 0), list[Tensor]()
    for _ in range(2000):
        if live and generator.random() < 0.5:
            live.pop(generator.randrange(len(live)))
        else:
            live.append(copies.copy(torch.zeros(generator.choice(sizes), dtype=torch.uint8)))
        for size in peak_counts:
            peak_counts[size] = max(
                peak_counts[size], sum(-(-buffer.numel() // PAGE) * PAGE == size for buffer in live)
            )
        assert copies.held == sum(size * count for size, count in peak_counts.items())


def test_a_limit_of_locked_memory() -> None:
    locks = Locks(limit=3 * PAGE)
    copies, source = locks.copies(), torch.arange(PAGE, dtype=torch.uint8)
    copied = [copies.copy(source) for _ in range(5)]
    assert all(torch.equal(buffer, source) for buffer in copied)
    assert copies.problem is not None and "\n" not in copies.problem
    assert "only 12.29 kB" in copies.problem and "(out of memory (2))" in copies.problem and "ulimit" in copies.problem
    assert locks.tries == 4 and copies.held == 3 * PAGE, "it is not tried again"
    del copied
    assert {copies.copy(source).data_ptr() for _ in range(2)} <= set(locks.sizes), "what there is is used"
    assert copies.memory_for(10).problem == copies.problem


def test_memory_is_unlocked_when_nothing_can_use_it() -> None:
    locks = Locks()
    copies = locks.copies()
    retained, dropped = copies.copy(torch.ones(9)), copies.copy(torch.ones(9))
    del copies, dropped
    assert retained.data_ptr() in locks.sizes and torch.equal(retained, torch.ones(9))
    del retained
    assert not locks.sizes


def test_forked_processes_do_not_have_it() -> None:
    copied = Locks().copies().copy(torch.zeros(1 << 16))
    mapped = r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$"
    ranges = re.findall(mapped, Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL)
    [flags] = [flags for start, end, flags in ranges if int(start, 16) <= copied.data_ptr() < int(end, 16)]
    assert "dc" in flags.split(), "not copied by fork"


def test_room_for_a_copy() -> None:
    rank_memory = RankMemory("a", 800, 0, 1000, None)
    assert lacks_memory([rank_memory]) is None
    assert re.search(r"^a has 1\.00 kB .* 1\.60 kB", lacks_memory([rank_memory, rank_memory]) or "")
    assert lacks_memory([rank_memory, RankMemory("b", 800, 0, 1000, None)]) is None
    held = RankMemory("a", 800, 900, 10, None)
    assert lacks_memory([held, held]) is None, "what is held takes no more"
    assert " 800 bytes" in (lacks_memory([held, RankMemory("a", 800, 0, 10, None)]) or "")


def test_no_value_is_read_on_the_way() -> None:
    """Tensors without values: steps that a fused optimizer counts on the device are copied like the rest."""
    param = nn.Parameter(torch.empty(4, 3, device="meta"))
    state = {key: torch.empty_like(param) for key in ("exp_avg", "exp_avg_sq")}
    optimizer = SimpleNamespace(state={param: {**state, "step": torch.empty((), device="meta")}})
    parts = OptimizerParts([(2, "w", param)], [], optimizer, ParallelGroups.single(), torch.float32, 0)
    [(layer, states)] = parts.gather({2: 0}, lambda tensor: tensor)
    shapes = {key: tuple(value.shape) for key, value in states["w"].items()}
    assert layer == 2 and shapes == {"exp_avg": (4, 3), "exp_avg_sq": (4, 3), "step": ()}


# -- saves ---------------------------------------------------------------------------------------------------
class Copied(TorchDispatchMode):
    """Bytes that operations copy, into memory that was there (`aten.copy_`) and into new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_into_existing, self.new = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name == "aten::copy_":
            self.bytes_into_existing += args[0].nbytes
        elif name in ("aten::_to_copy", "aten::clone"):
            self.new += args[0].nbytes
        return func(*args, **(kwargs or {}))


class RunRecord(NamedTuple):
    """The record of a run.

    events: what happened, in order, as (what, iteration of the run). saves: after each save the bytes held,
    tries to lock, bytes copied into existing memory, and into new memory.
    """

    events: list[tuple[str, int]]
    saves: list[tuple[int, int, int, int]]


def run(
    rank: int, world_size: int, values: dict[str, Any], kind: str = "ordinary", held: bool = True, full: int = -1
) -> RunRecord:
    """For the pool: a run with copies of a `kind`.

    held: files of a background save are written after the save has returned and the next step has changed
    every tensor in place. Only a save that does not wait allows this. full: the rank on whose disk the
    optimizer state of step 4 finds no room.
    """
    training, locks, record, mode = begin(values), Locks(), RunRecord([], []), Copied()
    checkpointer, progress = training.checkpointer, training.progress
    if kind != "ordinary":
        checkpointer._copies = LateCopies(locks) if kind == "late" else locks.copies()
    states, write, publish, save = checkpointer.states, pieces.save_tensors, saving.publish, checkpointer.save

    def watched(*args: Any) -> Any:
        mode.bytes_into_existing = mode.new = 0
        iterator = states(*args)
        while True:
            with mode:
                state = next(iterator, None)
            if state is None:
                break
            yield state
        record.saves.append((checkpointer._copies.held, locks.tries, mode.bytes_into_existing, mode.new))

    def held_write(state: Any, path: Path) -> Any:
        saved = int(path.parent.name.removeprefix(".tmp_global_step"))
        deadline = time.monotonic() + 60  # then the order of events is another
        while held and training.args.async_save and time.monotonic() < deadline:
            went_on = progress.iteration > saved or saved == values["train_iters"]
            if went_on and (f"saved {saved}", saved) in record.events:
                break
            time.sleep(0.001)
        if rank == full and saved == 4 and path.name.startswith("optim_"):
            raise OSError(28, "No space left on device")
        return write(state, path)

    def noted_publish(*args: Any) -> Path:
        record.events.append((f"published {args[2]}", progress.iteration))
        return publish(*args)

    def noted_save(now: Any, **kwargs: Any) -> None:
        save(now, **kwargs)
        record.events.append((f"saved {now.iteration}", progress.iteration))

    # This process is the pool's throw-away fork.
    pieces.save_tensors, saving.publish = held_write, noted_publish
    checkpointer.states, checkpointer.save = watched, noted_save  # type: ignore[method-assign]
    train(training)
    return record


def run_with_few_locks(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """Ranks may lock few pages, rank 0 of several as many as it likes."""
    training = begin(values)
    training.checkpointer._copies = Locks(limit=(1 << 40) if rank == 0 and world_size > 1 else 8 * PAGE).copies()
    train(training)


def values(save: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 3, "train_iters": 4, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 1}
    return config(NEOX, ADAMW, *parts, small, {"save": str(save), **overrides})


def sums(save: Path) -> dict[str, str]:
    """Checksums of the files of weights and optimizer state of all checkpoints."""
    files = sorted(save.glob("global_step*/manifest.json"))
    return {
        f"{file.parent.name}/{name}": record["sha256"] for file in files
        for name, record in json.loads(file.read_text())["files"].items() if name.startswith(("layer_", "optim_"))
    }  # fmt: skip


@pytest.mark.parametrize("name", cells(["zero1"], product=["tp2"]))
def test_checkpoints_are_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Each save but the first begins while the one before is written, by copies that arrive late."""
    ranks, layout = LAYOUTS[name]
    for kind, asynchronous in (("ordinary", False), ("late", True)):
        run_values = values(tmp_path / kind, layout, {"precision": "bfloat16"}, async_save=asynchronous)
        records = run_ranks(run, ranks, run_values, kind)
    ordinary_sums, late_sums = sums(tmp_path / "ordinary"), sums(tmp_path / "late")
    assert len(ordinary_sums) >= 4 * 8 and ordinary_sums == late_sums
    assert all(len({save[:2] for save in rank.saves}) == 1 for rank in records), "the first save takes all the memory"
    first_saves = [rank.saves[0] for rank in records]
    full_size = sum(file.stat().st_size for file in (tmp_path / "late/global_step4").glob("*_*.pt"))
    assert 0 < sum(save[0] for save in first_saves) < full_size + PAGE * sum(save[1] for save in first_saves)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_limit_is_said_once(ranks: int, tmp_path: Path) -> None:
    """Rank 0's at once, those of other ranks, whose logs are not shown, with the next save."""
    warned = run_ranks(warnings_of, ranks, values(tmp_path, LAYOUTS["zero1"][1]), run_with_few_locks)[0]
    [line] = [text for text in warned if "page-locked" in text]
    assert "out of memory (2)" in line and verify(tmp_path / "global_step4") is not None


def test_saves_that_are_waited_for_hold_two_files(tmp_path: Path) -> None:
    """Blocks are alike, so more of them take no more memory."""
    held = set[int]()
    for layers in (3, 6):
        run_values = values(tmp_path / str(layers), num_layers=layers, train_iters=2, async_save=False)
        held |= {save[0] for save in run_ranks(run, 1, run_values, "locked")[0].saves}
    assert len(held) == 1 and min(held) > 0


def test_every_byte_is_copied_once(tmp_path: Path) -> None:
    """Into locked memory, or into new memory where there is none to be had."""
    kinds = ("ordinary", "locked")
    amounts = [run_ranks(run, 1, values(tmp_path / kind, train_iters=2), kind)[0].saves for kind in kinds]
    files = (tmp_path / "locked/global_step2").glob("[lo]*_*.pt")
    size = sum(leaf.nbytes for file in files for leaf in tree_leaves(torch.load(file, weights_only=True)))
    for (_, _, _, ordinary), (_, _, bytes_into_existing, bytes_into_new) in zip(*amounts, strict=True):
        assert bytes_into_existing == size and bytes_into_new == ordinary - size and bytes_into_new < size / 10


def test_one_copy_at_a_time(tmp_path: Path) -> None:
    """Steps go on while it is written; a save that comes meanwhile waits for it, and none is left out."""
    events = run_ranks(run, 1, values(tmp_path, checkpoint_factor=2, extra_save_iters=[3]))[0].events
    assert [event for event, _ in events] == [
        f"{event} {step}" for step in (2, 3, 4) for event in ("saved", "published")
    ]
    assert dict(events)["published 2"] == 3, "a step was made while it was written"


@pytest.mark.parametrize(("name", "rank"), [("zero1", 0), ("tp2", 1)])
def test_failure_surfaces_at_the_next_step(name: str, rank: int, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    run_values = values(tmp_path, layout, train_iters=1000, checkpoint_factor=1000, extra_save_iters=[2, 4])
    with pytest.raises(AssertionError, match=r"No space left.*earlier ones are untouched"):
        run_ranks(run, ranks, run_values, full=rank)
    state = json.loads((tmp_path / "status.json").read_text())
    assert state["status"] == "failed" and "No space left" in state["reason"]
    assert 4 < state["iteration"] < 1000, "not at the end of the run, which is also the next save"
    assert (tmp_path / "latest").read_text() == "global_step2" and verify(tmp_path / "global_step2") is not None
    assert [path.name for path in tmp_path.glob("*global_step*")] == ["global_step2"]


def test_failure_of_the_last_save_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="CheckpointError.*No space left"):
        run_ranks(run, 1, values(tmp_path, checkpoint_factor=4), full=0)
    assert not (tmp_path / "latest").exists()


def run_without_memory(rank: int, world_size: int, values: dict[str, Any]) -> tuple[RunRecord, str]:
    """For the pool: a machine with all its memory taken; what it warns of."""
    copies_module.free_host_memory = lambda unknown: 1000  # type: ignore[assignment]
    records = list[RunRecord]()
    warned = warnings_of(rank, world_size, values, lambda *args: records.append(run(*args, held=False)))
    return records[0], "\n".join(warned)


def test_saves_that_are_waited_for(tmp_path: Path) -> None:
    order = [("published 2", 2), ("saved 2", 2), ("published 4", 4), ("saved 4", 4)]
    assert run_ranks(run, 1, values(tmp_path, checkpoint_factor=2, async_save=False))[0].events == order
    record, warned = run_ranks(run_without_memory, 1, values(tmp_path / "full", checkpoint_factor=2))[0]
    assert record.events == order and verify(tmp_path / "full" / "global_step4") is not None
    assert "async_save" in warned and " 1.00 kB " in warned
