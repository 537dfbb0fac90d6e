"""`deterministic_mode`: what it sets, what it refuses, and two runs of the same bits."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_forward_check import log_of
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, begin, bit_equal, config, curves, run_to_end


def values(**more: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 4, "train_micro_batch_size_per_gpu": 2, "hidden_dropout": 0.1}
    return config(LLAMA, ADAMW, small, {"deterministic_mode": True, **more})


def settings(rank: int, world_size: int, given: dict[str, Any]) -> dict[str, Any]:
    """For the pool: what a run has set."""
    begin(given)
    return {
        "torch": torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark,
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "nccl": os.environ.get("NCCL_ALGO"),
    }


def test_what_is_set() -> None:
    assert run_ranks(settings, 1, values())[0] == {"torch": True, "cudnn": True, "cublas": ":4096:8", "nccl": "Ring"}
    kept = run_ranks(settings, 1, values(), env={"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree"})[0]
    assert (kept["cublas"], kept["nccl"]) == (":16:8", "Tree")
    off = run_ranks(settings, 1, values(deterministic_mode=False))[0]
    assert off == {"torch": False, "cudnn": False, "cublas": None, "nccl": None}


def test_it_says_so() -> None:
    (line,) = [line for line in run_ranks(log_of, 1, values())[0] if line.startswith("deterministic_mode:")]
    assert "use_deterministic_algorithms(True)" in line and "CUBLAS_WORKSPACE_CONFIG=:4096:8" in line


@pytest.mark.parametrize("name", ["CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"])
def test_an_environment_that_asks_for_the_opposite_is_refused(name: str) -> None:
    message = rf"ConfigError: .*deterministic_mode: the environment sets {name}=other; unset it, or use one of"
    with pytest.raises(AssertionError, match=message):
        run_ranks(settings, 1, values(), env={name: "other"})


@pytest.mark.parametrize("name", with_more(["plain", "pp2", "zero2", "zero3"], "plain", "zero2"))
def test_layouts_train_and_repeat(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    given = values(**layout)
    first, second = (run_ranks(curves, ranks, [given], 4) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a[0].losses == b[0].losses and bit_equal(a[0].weights, b[0].weights)
    plain = run_ranks(curves, ranks, [{**given, "deterministic_mode": False}], 4)
    assert plain[0][0].losses == pytest.approx(first[0][0].losses, rel=1e-5)


def test_data_seed_moves_the_data_and_nothing_else(tmp_path: Path) -> None:
    base = values(save=str(tmp_path), checkpoint_factor=2)
    apart, together = (run_ranks(curves, 1, [{**base, **seeds}], 1)[0][0] for seeds in ({"data_seed": 7}, {}))
    assert apart.losses != together.losses
    same = run_ranks(curves, 1, [{**base, "data_seed": 1234}], 1)[0][0]
    assert same.losses == together.losses
    run_ranks(run_to_end, 1, base)
    elsewhere = base | {"save": str(tmp_path / "b"), "load": str(tmp_path), "train_iters": 5}
    with pytest.raises(AssertionError, match=r"data_seed: 7 \(program\), but the run of .* had 1234; set it back"):
        run_ranks(run_to_end, 1, elsewhere | {"data_seed": 7})
    run_ranks(run_to_end, 1, elsewhere | {"data_seed": 1234})
