"""Writing beside the steps: the same files, steps that go on meanwhile, and failures that are told."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import load_tensors, verify
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LAYOUTS, NEOX, bit_equal, config, run_to_end

SLOW = 0.05  # seconds a file; a step takes a hundredth


def values(save: Path, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 6, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 2}
    return config(NEOX, ADAMW, *parts, small, {"save": str(save), **more})


def train_slowly(
    rank: int, world_size: int, given: dict[str, Any], fails: tuple[int, int] | None = None, held: bool = False
) -> list[tuple[str, int]]:
    """For the pool: every file takes a while to write. fails: (rank, file) that meets a full disk. held: no
    checkpoint is published before its save has returned and another step is made, which only a save that
    does not wait allows. What happened, in order: (what, iteration of the run)."""
    from megatron.training import train
    from megatron.training.checkpoint import writer as saving
    from tests.training.runs import begin

    training = begin(given)
    progress, seen, written = training.progress, [], [0]
    save, publish, checkpoint = saving.save_tensors, saving.publish, training.checkpointer.save

    def slow(*args: Any) -> Any:
        written[0] += 1
        if (rank, written[0]) == fails:
            raise OSError(28, "No space left on device")
        time.sleep(SLOW)
        return save(*args)

    def noted_publish(*args: Any) -> Path:
        until = time.monotonic() + 60 if held else 0
        while time.monotonic() < until and not returned_and_went_on(args[2]):
            time.sleep(0.01)
        seen.append((f"published {args[2]}", progress.iteration))
        return publish(*args)

    def returned_and_went_on(saved: int) -> bool:
        return (f"saved {saved}", saved) in seen and (progress.iteration > saved or saved == given["train_iters"])

    def noted_save(now: Any, **more: Any) -> None:
        checkpoint(now, **more)
        seen.append((f"saved {now.iteration}", progress.iteration))

    # This process is the pool's throw-away fork.
    saving.save_tensors, saving.publish = slow, noted_publish  # type: ignore[assignment]
    training.checkpointer.save = noted_save  # type: ignore[assignment, method-assign]
    train(training)
    return seen


@pytest.mark.parametrize("name", with_more(["plain", "zero1", "tp2"], "zero1", product=["plain"]))
def test_same_files_though_the_steps_go_on(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    common = layout | {"precision": "bfloat16"}
    run_ranks(run_to_end, ranks, values(tmp_path / "sync", common, async_save=False))
    # The first write outlasts the steps that follow it, which change every tensor in place.
    seen = run_ranks(train_slowly, ranks, values(tmp_path / "async", common, checkpoint_factor=3), None, True)[0]
    assert [what for what, _ in seen] == ["saved 3", "published 3", "saved 6", "published 6"]
    assert dict(seen)["published 3"] > 3, "steps were made while it was written"
    run_ranks(run_to_end, ranks, values(tmp_path / "sync3", common, async_save=False, checkpoint_factor=3))
    for step in ("global_step3", "global_step6"):
        ours, theirs = tmp_path / "async" / step, tmp_path / "sync3" / step
        assert verify(ours) is not None
        files = sorted(path.name for kind in ("layer_*", "optim_*") for path in theirs.glob(kind))
        assert files == sorted(path.name for kind in ("layer_*", "optim_*") for path in ours.glob(kind))
        for file in files:
            one, other = load_tensors(ours / file), load_tensors(theirs / file)
            flat = [{0: s} if file.startswith("layer") else {i: s[i] for i in s} for s in (one, other)]
            assert bit_equal(*flat), (step, file)


def test_one_copy_at_a_time(tmp_path: Path) -> None:
    """A save that comes while the one before is written waits for it; none is left out."""
    seen = run_ranks(train_slowly, 1, values(tmp_path, checkpoint_factor=1, train_iters=3), None, True)[0]
    assert [what for what, _ in seen] == [
        "saved 1", "published 1", "saved 2", "published 2", "saved 3", "published 3",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "rank"), [("plain", 0), ("zero1", 0), ("tp2", 1)])
def test_failure_surfaces_at_the_next_step(name: str, rank: int, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    run_ranks(run_to_end, ranks, values(tmp_path, layout, train_iters=2, lr_decay_iters=400))
    given = values(tmp_path, layout, train_iters=400, checkpoint_factor=4, allow_changed_data=True)
    with pytest.raises(AssertionError, match=r"could not be written \(No space left.*earlier ones are untouched"):
        run_ranks(train_slowly, ranks, given, (rank, 2))
    state = json.loads((tmp_path / "status.json").read_text())
    assert state["status"] == "failed" and "could not be written" in state["reason"]
    # One file was written before it; a step more until all ranks have heard of it.
    assert 4 < state["iteration"] < 200, "not at the end of the run, nor at the next save"
    assert (tmp_path / "latest").read_text() == "global_step2" and verify(tmp_path / "global_step2") is not None
    assert [path.name for path in tmp_path.glob("*global_step*")] == ["global_step2"]


def test_failure_of_the_last_save_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"could not be written \(No space left"):
        run_ranks(train_slowly, 1, values(tmp_path, train_iters=2), (0, 2))
    assert not (tmp_path / "latest").exists()


def test_no_room_for_a_copy(tmp_path: Path) -> None:
    """Said, and that save is waited for."""
    seen, logs = run_ranks(train_without_memory, 1, values(tmp_path, train_iters=2))[0]
    assert seen == [("published 2", 2), ("saved 2", 2)]
    assert "has 1.00 kB of memory free, a copy of the checkpoint takes " in logs and "this one is waited for" in logs
    assert verify(tmp_path / "global_step2") is not None


def train_without_memory(rank: int, world_size: int, given: dict[str, Any]) -> tuple[list[tuple[str, int]], str]:
    """For the pool: a machine with all its memory taken."""
    import io
    import logging

    from megatron.training.checkpoint import host_copies

    host_copies.free_host_memory = lambda unknown: 1000
    log_stream = io.StringIO()
    logging.getLogger("megatron").addHandler(logging.StreamHandler(log_stream))
    warned: list[str] = []
    logging.Logger.warning = lambda self, text, *a: warned.append(text)  # type: ignore[method-assign, assignment]
    return train_slowly(rank, world_size, given), "\n".join(warned)


def test_key_turns_it_off(tmp_path: Path) -> None:
    seen = run_ranks(train_slowly, 1, values(tmp_path, async_save=False))[0]
    assert [("published 2", 2), ("saved 2", 2)] == seen[:2]
    assert torch.equal(*(torch.tensor([step for what, step in seen if what.startswith(kind)]) for kind in ("p", "s")))
