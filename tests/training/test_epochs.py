"""A run given in epochs: its iterations, its schedule, its resume; and data that machines do not share."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses, stop_after
from tests.training.runs import ADAMW, GOLDEN, NEOX, begin, bit_equal, config, curves, run_to_end


def values(**more: Any) -> dict[str, Any]:
    small = {"num_layers": 1, "train_batch_size": 48, "lr_decay_style": "cosine", "split": "100,0,0"}
    given = config(NEOX, ADAMW, small, {"train_epochs": 2, "train_iters": None, **more})
    return {key: value for key, value in given.items() if value is not None}


def facts(rank: int, world_size: int, given: dict[str, Any]) -> dict[str, Any]:
    """For the pool: what a run became of the epochs."""
    training = begin(given)
    train = training.datasets.train
    assert train is not None
    return {
        "iterations": training.args.train_iters,
        "decay": training.args.lr_decay_iters,
        "end": training.schedule.end,
        "samples": len(train),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_iterations_follow_from_the_data(ranks: int) -> None:
    everyone = run_ranks(facts, ranks, values())
    samples = everyone[0]["samples"]
    assert samples % 2 == 0 and samples % 48
    iterations = samples // 48
    assert everyone == [{"iterations": iterations, "decay": iterations, "end": iterations, "samples": samples}] * ranks
    half = run_ranks(facts, ranks, values(lr_decay_fraction=0.5))[0]
    assert half["decay"] == half["end"] == int(iterations * 0.5)


def test_a_run_ends_goes_on_and_can_get_longer(tmp_path: Path) -> None:
    given = values(save=str(tmp_path / "a"), checkpoint_factor=3, hidden_dropout=0.1)
    through = run_ranks(run_to_end, 1, given)[0][1]
    stopped = {**given, "save": str(tmp_path / "b")}
    run_ranks(stop_after, 1, stopped, 3)
    assert bit_equal(through, run_ranks(run_to_end, 1, stopped)[0][1])
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    iterations = max(losses(tmp_path / "a"))
    assert json.loads((tmp_path / "a" / "status.json").read_text())["train_iters"] == iterations
    with pytest.raises(AssertionError, match=rf"train_epochs: end_iter \d+ \(program\), but .* had {iterations}; "):
        run_ranks(run_to_end, 1, {**stopped, "train_epochs": 3})
    longer = {**stopped, "train_epochs": 3, "lr_decay_iters": iterations}
    run_ranks(run_to_end, 1, longer)
    assert max(losses(tmp_path / "b")) == run_ranks(facts, 1, longer)[0]["iterations"] > iterations


def test_the_second_epoch_is_the_first_again() -> None:
    """Without learning, losses of the second pass are those of the first."""
    still = {"optimizer": {"type": "SGD", "params": {"lr": 1e-12}}, "train_batch_size": 1, "warmup": 0.0}
    still |= {"seq_length": 512, "max_position_embeddings": 512, "lr_decay_style": "constant", "weight_decay": 0.0}
    steps = run_ranks(facts, 1, values(**still))[0]["iterations"]
    step_losses = run_ranks(curves, 1, [values(**still)], steps)[0][0].losses
    assert step_losses[: steps // 2] == pytest.approx(step_losses[steps // 2 :], rel=1e-6) and len(set(step_losses)) > 3


def on_own_machine(rank: int, world_size: int, given: dict[str, Any]) -> list[float]:
    """For the pool: each rank is the first of a machine with its own folders."""
    os.environ["LOCAL_RANK"] = "0"
    machine_keys = {"index_cache_dir": given["index_cache_dir"].format(rank)}
    if "{}" in given["data_path"]:
        machine_keys["data_path"] = given["data_path"].format(rank)
    return curves(rank, world_size, [{**given, **machine_keys}], 2)[0].losses


def test_machines_without_shared_files_make_their_own_maps(tmp_path: Path) -> None:
    given = config(NEOX, num_layers=1, train_iters=2, use_shared_fs=False, index_cache_dir=f"{tmp_path}/cache{{}}")
    by_rank = run_ranks(on_own_machine, 2, given)
    assert by_rank[0] == by_rank[1] == pytest.approx(run_ranks(curves, 1, [config(NEOX, num_layers=1)], 2)[0][0].losses)
    names = [sorted(path.name for path in (tmp_path / f"cache{rank}").iterdir()) for rank in range(2)]
    assert names[0] == names[1] != []


def test_machines_with_different_data_are_refused(tmp_path: Path) -> None:
    for rank, name in enumerate("AB"):
        for suffix in ("bin", "idx"):
            source = GOLDEN / "dataset" / f"corpus{name}_text_document.{suffix}"
            (tmp_path / f"data{rank}.{suffix}").write_bytes(source.read_bytes())
    given = config(NEOX, use_shared_fs=False, data_path=f"{tmp_path}/data{{}}", index_cache_dir=f"{tmp_path}/cache{{}}")
    with pytest.raises(
        AssertionError, match="use_shared_fs: false: the data on rank 1's machine is not that of rank 0's"
    ):
        run_ranks(on_own_machine, 2, given)
