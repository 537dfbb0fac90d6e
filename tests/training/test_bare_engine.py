"""The loop asks nothing of an engine but its protocol: one of bare torch trains, stops and goes on."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.training.deepspeed.engine import DeepSpeedEngine
from megatron.training.engine import Engine
from tests.model.stages import Weights
from tests.pool import run_ranks
from tests.training.bare_engine import BareEngine
from tests.training.runs import ADAMW, NEOX, begin, bit_equal, config, metric_rows
from tests.training.test_nonfinite import poison, train_until_error

ENGINES: dict[str, type[Engine]] = {"bare": BareEngine, "deepspeed": DeepSpeedEngine}


def go(rank: int, world_size: int, values: dict[str, Any], name: str, bad: tuple[int, ...] = ()) -> tuple[str, Weights]:
    """For the pool: a run by the engine of that name whose gradients of the steps `bad` are not finite."""
    training = begin(values, ENGINES[name])
    poison(training, set(bad), math.nan)
    return train_until_error(training) or "", training.engine.weights(master=True)


def values_of(save: Path, **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_micro_batch_size_per_gpu": 4, "train_iters": 6, "hidden_dropout": 0.1}
    logged = {"log_grad_norm": True, "log_param_norm": True, "log_optimizer_states": True, "log_interval": 2}
    places = {"save": str(save), "load": str(save), "checkpoint_factor": 3, "eval_iters": 1, "eval_interval": 3}
    return config(NEOX, ADAMW, small, logged, places, overrides)


def rows_of(save: Path) -> list[dict[str, float]]:
    """Rows of the log without times."""
    rows = metric_rows(save, "iteration")
    return [{k: v for k, v in row.items() if k not in ("run_id", "time") and "runtime" not in k} for row in rows]


def test_it_trains_and_goes_on_as_deepspeeds_engine(tmp_path: Path) -> None:
    _, bare = run_ranks(go, 1, values_of(tmp_path / "bare"), "bare")[0]
    _, with_deepspeed = run_ranks(go, 1, values_of(tmp_path / "theirs"), "deepspeed")[0]
    assert bit_equal(bare, with_deepspeed)
    assert [row["iteration"] for row in rows_of(tmp_path / "bare")] == [0, 2, 3, 4, 6]
    assert rows_of(tmp_path / "bare") == rows_of(tmp_path / "theirs")
    for engine in ENGINES:  # its checkpoint is the other's too
        stopped = values_of(tmp_path / f"stopped, {engine}", exit_interval=3)
        run_ranks(go, 1, stopped, "bare")
        assert bit_equal(run_ranks(go, 1, {**stopped, "exit_interval": None}, engine)[0][1], bare)


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_that_is_not_finite_is_known_late_and_changes_nothing(name: str, tmp_path: Path) -> None:
    """The loop knows of step 4 when step 5 has begun, and saves the weights of step 3 all the same."""
    message, weights = run_ranks(go, 1, values_of(tmp_path / "run", checkpoint_factor=100), name, (4,))[0]
    assert re.search("^step 4: rank 0: gradient of .*step 3", message)
    assert (tmp_path / "run" / "latest").read_text() == "global_step3"
    good = values_of(tmp_path / "good", train_iters=3, lr_decay_iters=6)
    assert bit_equal(weights, run_ranks(go, 1, good, name)[0][1])


@pytest.mark.parametrize("name", ENGINES)
def test_left_out_steps_are_left_out(name: str, tmp_path: Path) -> None:
    values = values_of(tmp_path / "run", on_nonfinite="skip", nonfinite_limit=2, checkpoint_factor=100)
    message, _ = run_ranks(go, 1, values, name, (1, 3))[0]
    assert not message and json.loads((tmp_path / "run" / "training_summary.json").read_text())["skipped_steps"] == 2
    message, _ = run_ranks(go, 1, {**values, "save": str(tmp_path / "b"), "load": None}, name, (2, 3, 4))[0]
    assert re.search("step 3.*on_nonfinite: skip.*3 steps", message)
