"""Copies of the last steps on the machines (`local_save`): a restart goes on from them to the same bits."""

import io
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron.checkpointing import list_checkpoints
from megatron.launch import process_info
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training import start, train
from megatron.training.builtin_callbacks.status import write_stopped_start
from megatron.training.checkpoint.local_saves import START
from tests.pool import run_ranks
from tests.training.runs import ADAMW, NEOX, before_steps, begin, bit_equal, cells, config, output_of_run, run_to_end

LAST, LOST = 7, 6  # the last step, and the one before which all ranks are lost
Weights = dict[int, dict[str, Tensor]]


class Lost(BaseException):
    """Ends a rank as a kill would: nothing that catches exceptions saves anything."""


def values_of(folder: Path, **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "train_iters": LAST}
    save = {"save": str(folder / "save"), "load": str(folder / "save"), "checkpoint_factor": 4, "async_save": False}
    local = {"local_save": f"{folder}/$LOCAL_DISK", "local_save_interval": 1}
    return config(NEOX, ADAMW, small, save, local, **overrides)


def on_machines(rank: int, world_size: int, machines: int, fn: Callable[..., Any], *args: Any) -> Any:
    """For the pool: calls a function on ranks that stand for several machines, each with its own disk."""
    os.environ["LOCAL_DISK"] = f"disk{rank * machines // world_size}"
    return fn(rank, world_size, *args)


def train_until_lost(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: trains until all ranks are lost; returns what the run prints."""
    with redirect_stdout(io.StringIO()) as output:
        training = start(NeoXArgs.from_dict(values), process_info())

        def lose(iteration: int) -> None:
            if iteration == LOST:
                raise Lost

        before_steps(training, lose)
        with suppress(Lost):
            train(training)
        training.engine.close()
    return output.getvalue()


def resume(rank: int, world_size: int, values: dict[str, Any]) -> tuple[str, Weights]:
    """For the pool: what a run prints, and its last weights."""
    with redirect_stdout(io.StringIO()) as output:
        training = start(NeoXArgs.from_dict(values), process_info())
        train(training)
        weights = training.engine.weights(master=True)
        training.engine.close()
    return output.getvalue(), {layer: {k: v.clone() for k, v in tensors.items()} for layer, tensors in weights.items()}


def lose_run(folder: Path, ranks: int, machines: int, **overrides: Any) -> dict[str, Any]:
    """Trains until all ranks are lost, and returns the configuration."""
    values = values_of(folder, **overrides)
    output = run_ranks(on_machines, ranks, machines, train_until_lost, values)[0]
    assert "local_save: step 1 took" in output
    return values


def disk(folder: Path, machine: int) -> Path:
    """Returns the folder of the run's copies on a machine."""
    return next(path for path in (folder / f"disk{machine}").iterdir())


def undisturbed(values: dict[str, Any], folder: Path, ranks: int) -> list[Weights]:
    """Returns the last weights, by rank, of the same run without copies and without loss."""
    keys = {key: value for key, value in values.items() if not key.startswith("local_save")}
    return [weights for _, weights in run_ranks(run_to_end, ranks, {**keys, "save": str(folder), "load": str(folder)})]


def assert_resumes(values: dict[str, Any], folder: Path, ranks: int, machines: int, place: str) -> str:
    """Checks that the run goes on from `place` to the same bits; returns what it prints."""
    results = run_ranks(on_machines, ranks, machines, resume, values)
    output = results[0][0]
    (line,) = [line for line in output.splitlines() if "going on from" in line and "iteration" in line]
    assert place in line, output
    for (_, weights), expected in zip(results, undisturbed(values, folder / "undisturbed", ranks), strict=True):
        assert bit_equal(weights, expected)
    return output


LAYOUTS = {
    "one rank": (1, 1, {}),
    "dp2 ZeRO 1, two machines": (2, 2, {"zero_optimization": {"stage": 1}}),
    "tp2 dp2 ZeRO 3, two machines": (4, 2, {"model_parallel_size": 2, "zero_optimization": {"stage": 3}}),
    "pp2, two machines": (2, 2, {"pipe_parallel_size": 2}),
    "dp3, three machines": (3, 3, {"train_batch_size": 6}),
    "deepspeed, dp2 ZeRO 1": (2, 2, {"engine": "deepspeed", "zero_optimization": {"stage": 1}}),
    "pp3, frozen stages": (3, 3, {"pipe_parallel_size": 3, "num_layers": 3, "trainable": {"last_layers": 1}}),
    "async saves": (2, 2, {"async_save": True}),
}


OTHER_LAYOUTS = ["dp2 ZeRO 1, two machines", "tp2 dp2 ZeRO 3, two machines", "dp3, three machines",
                 "deepspeed, dp2 ZeRO 1", "async saves"]  # fmt: skip


@pytest.mark.parametrize("layout", cells(["one rank", "pp2, two machines", "pp3, frozen stages"], OTHER_LAYOUTS))
def test_goes_on_from_the_last_step_with_a_copy(layout: str, tmp_path: Path) -> None:
    ranks, machines, keys = LAYOUTS[layout]
    values = lose_run(tmp_path, ranks, machines, **keys)
    copy = disk(tmp_path, 0) / f"global_step{LOST - 1}"
    assert list_checkpoints(copy.parent) == [copy], "the copies before it are deleted"
    if machines > 1:
        shutil.rmtree(tmp_path / "disk1")  # another machine takes its place
    assert_resumes(values, tmp_path, ranks, machines, str(copy))
    assert not copy.parent.exists(), "the run has ended; its last step is in save"


def test_rank_zeros_machine_is_lost(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 2, 2, pipe_parallel_size=2)
    shutil.rmtree(tmp_path / "disk0")
    output = assert_resumes(values, tmp_path, 2, 2, f"global_step{LOST - 1}")
    assert "came from other machines" in output


@pytest.mark.parametrize(
    "harm", ["both machines are lost", "a byte is flipped", "a file is cut", "its note is another object"]
)
def test_goes_on_from_save_without_a_good_copy(harm: str, tmp_path: Path) -> None:
    values = lose_run(tmp_path, 2, 2)
    if harm == "its note is another object":
        for machine in (0, 1):
            (disk(tmp_path, machine) / f"global_step{LOST - 1}" / START).write_text('{"configuration": 1}')
    elif harm == "both machines are lost":
        shutil.rmtree(tmp_path / "disk0")
        shutil.rmtree(tmp_path / "disk1")
    else:
        for machine in (0, 1):
            file = disk(tmp_path, machine) / f"global_step{LOST - 1}" / "layer_02-model_00-model_states.pt"
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content[: -1 if harm == "a file is cut" else None])
    output = assert_resumes(values, tmp_path, 2, 2, str(tmp_path / "save" / "global_step4"))
    assert ("layer_02-model_00-model_states.pt (checksum)" in output) == (harm == "a byte is flipped")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"lr_decay_iters": 99}, "lr_decay_iters"), ({"restart": True}, "freshly"), ({"iteration": 4}, "global_step4")],
    ids=["another key", "restart", "iteration"],
)
def test_other_starts_do_not_use_the_copy(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1) | change
    output = run_ranks(on_machines, 1, 1, output_of_run, values)[0]
    assert words in output and f"going on from {disk(tmp_path, 0)}" not in output


def test_launch_settings_may_change(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1) | {"master_port": 4321, "log_dir": str(tmp_path / "logs"), "max_restarts": 7}
    output = run_ranks(on_machines, 1, 1, output_of_run, values)[0]
    assert f"going on from {disk(tmp_path, 0)}" in output


def test_a_copy_of_the_first_start_serves_the_next(tmp_path: Path) -> None:
    """`restart` and `iteration` are dropped after the first save."""
    values = lose_run(tmp_path, 1, 1, restart=True)
    output = run_ranks(on_machines, 1, 1, output_of_run, values | {"restart": False})[0]
    assert f"going on from {disk(tmp_path, 0)}" in output


def test_a_save_that_goes_back_leaves_the_copy(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1, checkpoint_factor=2)
    shutil.rmtree(tmp_path / "save" / "global_step4")
    (tmp_path / "save" / "latest").write_text("global_step2")
    output = run_ranks(on_machines, 1, 1, output_of_run, values)[0]
    assert "step 4" in output and f"going on from {tmp_path}/save/global_step2" in output


def test_a_stop_during_the_start_leaves_the_run(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1, checkpoint_factor=100)
    write_stopped_start(NeoXArgs.from_dict(values), 0, "SIGUSR1")
    assert_resumes(values, tmp_path, 1, 1, f"global_step{LOST - 1}")


def test_a_damaged_small_file_is_not_carried_on(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1)
    (file,) = disk(tmp_path, 0).rglob("tokenizer.json")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    output = assert_resumes(values, tmp_path, 1, 1, str(tmp_path / "save" / "global_step4"))
    assert "tokenizer.json (checksum)" in output


def test_a_finished_run_removes_what_is_left(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1)
    shutil.copytree(tmp_path / "disk0", tmp_path / "left")
    run_ranks(on_machines, 1, 1, resume, values)
    shutil.copytree(tmp_path / "left", tmp_path / "disk0", dirs_exist_ok=True)
    output = run_ranks(on_machines, 1, 1, resume, values)[0][0]
    assert "nothing left to do" in output and not list((tmp_path / "disk0").iterdir())


def test_nobody_else_reads_a_copy(tmp_path: Path) -> None:
    lose_run(tmp_path, 1, 1, wandb_host="https://user:s3cret@example.org")
    assert not [path for path in disk(tmp_path, 0).rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert stat.S_IMODE(disk(tmp_path, 0).stat().st_mode) == 0o700


def test_a_deleted_run_leaves_its_copy(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1, checkpoint_factor=100)
    shutil.rmtree(tmp_path / "save")
    output = run_ranks(on_machines, 1, 1, output_of_run, values)[0]
    assert "starting from freshly initialised weights" in output


def test_a_run_without_a_checkpoint_goes_on_from_its_copy(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1, checkpoint_factor=100)
    assert not list_checkpoints(tmp_path / "save")
    assert_resumes(values, tmp_path, 1, 1, f"global_step{LOST - 1}")


def save_at_once(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a run that is told to save before its first step."""
    training = begin(values)
    training.checkpointer.save(training.progress)
    training.checkpointer.wait()


def test_the_step_of_a_copy_can_be_saved(tmp_path: Path) -> None:
    values = lose_run(tmp_path, 1, 1)
    run_ranks(on_machines, 1, 1, save_at_once, values)
    assert (tmp_path / "save" / f"global_step{LOST - 1}" / "manifest.json").is_file()


def fail_at_step_5(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: rank 1 cannot write the copy of step 5."""
    from megatron.training.checkpoint import pieces

    save = pieces.save_tensors

    def full(state: Any, path: Path) -> Any:
        if rank == 1 and path.parent.name == ".tmp_global_step5":
            raise OSError(28, "No space left on device")
        return save(state, path)

    pieces.save_tensors = full  # this process is the pool's throw-away fork
    return train_until_lost(rank, world_size, values)


def test_a_full_disk_leaves_the_copy_before(tmp_path: Path) -> None:
    values = values_of(tmp_path, checkpoint_factor=100)
    output = run_ranks(on_machines, 2, 2, fail_at_step_5, values)[0]
    assert "No space left" in output
    assert_resumes(values, tmp_path, 2, 2, "global_step4")


def test_no_room_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setenv("LOCAL_DISK", "disk0")
    training = begin(values_of(tmp_path, checkpoint_factor=100, load=None))
    with pytest.raises(ConfigError, match=r"local_save: .*disk0.* free"):
        train(training)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"local_save_interval": 0}, "local_save_interval"), ({"save": None}, "save"),
        ({"save": "s3://bucket/run"}, "save"), ({"local_save": "s3://bucket/run"}, "address"),
        ({"compat_no_save_optim": True}, "optimizer"),
    ],
)  # fmt: skip
def test_refused_keys(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"local_save: .*{key}"):
        NeoXArgs.from_dict(values_of(tmp_path) | change)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_DISK", "file")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"local_save: .*/file/.*cannot be written"):
        begin(values_of(tmp_path, load=None))


def test_an_unknown_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_DISK", raising=False)
    with pytest.raises(ConfigError, match=r"local_save: .*\$LOCAL_DISK"):
        begin(values_of(tmp_path, load=None))
