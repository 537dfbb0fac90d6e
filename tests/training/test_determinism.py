"""Numbers that stay: runs that repeat, recomputation in every form, and bf16 beside fp32."""

import hashlib
import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.training.recompute import recomputed_product_share
from tests.model.stages import make_stage, random_batch, random_weights, small
from tests.pool import run_ranks
from tests.training import runs
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, NEOX, bit_equal, cells, config, curves, run_to_end

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


def values(**overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 4, "train_micro_batch_size_per_gpu": 2, "hidden_dropout": 0.1}
    return config(LLAMA, ADAMW, small, {"deterministic_mode": True, **overrides})


def settings(rank: int, world_size: int, values: dict[str, Any]) -> tuple[bool, bool, list[str | None]]:
    """For the pool: what a run has set in torch, in cuDNN, and in the environment."""
    runs.begin(values)
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    in_torch = torch.are_deterministic_algorithms_enabled() and not warns_only
    in_cudnn = torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    return in_torch, in_cudnn, [os.environ.get(name) for name in VARIABLES]


@pytest.mark.parametrize(("on", "env", "expected"), [
    (True, {}, (True, True, [":4096:8", "Ring"])),
    (True, dict(zip(VARIABLES, (":16:8", "Tree"), strict=True)), (True, True, [":16:8", "Tree"])),
    (False, {}, (False, False, [None, None])),
])  # fmt: skip
def test_what_is_set(on: bool, env: dict[str, str], expected: tuple[bool, bool, list[str | None]]) -> None:
    assert run_ranks(settings, 1, values(deterministic_mode=on), env=env)[0] == expected


def test_it_says_so() -> None:
    (line,) = [
        line for line in run_ranks(runs.output_of_run, 1, values())[0].splitlines() if "deterministic_mode: " in line
    ]
    assert "use_deterministic_algorithms(True)" in line and "CUBLAS_WORKSPACE_CONFIG=:4096:8" in line


@pytest.mark.parametrize("name", VARIABLES)
def test_an_environment_that_asks_for_the_opposite_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"ConfigError: .*deterministic_mode: .*{name}=other"):
        run_ranks(settings, 1, values(), env={name: "other"})


@pytest.mark.parametrize("name", cells(["pp2", "zero3"], ["zero2"], ["plain"]))
def test_layouts_train_and_repeat(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    run_values = values(**layout)
    for first_run, second_run, nondeterministic in run_ranks(
        curves, ranks, [run_values, run_values, {**run_values, "deterministic_mode": False}], 3
    ):
        assert first_run.losses == second_run.losses and bit_equal(first_run.weights, second_run.weights)
        assert nondeterministic.losses == pytest.approx(first_run.losses, rel=1e-5)


def test_data_seed_moves_the_data_and_nothing_else(tmp_path: Path) -> None:
    base = values(save=str(tmp_path), checkpoint_factor=2)
    other_data_seed, no_data_seed, same_data_seed = run_ranks(
        curves, 1, [base | {"data_seed": 7}, base, base | {"data_seed": 1234}], 1
    )[0]
    assert other_data_seed.losses != no_data_seed.losses == same_data_seed.losses
    run_ranks(run_to_end, 1, base)
    resumed = base | {"save": str(tmp_path / "b"), "load": str(tmp_path), "train_iters": 5}
    with pytest.raises(AssertionError, match=r"data_seed: 7 .*1234"):
        run_ranks(run_to_end, 1, resumed | {"data_seed": 7})
    run_ranks(run_to_end, 1, resumed | {"data_seed": 1234})


def disturbed_run(rank: int, world_size: int, values: dict[str, Any], seed: int) -> None:
    """For the pool: a run in a process whose generators have been used before."""
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    run_to_end(rank, world_size, values)


@pytest.mark.parametrize(
    ("name", "overrides"), [("plain", {"num_workers": 1, "hidden_dropout": 0.1, "async_save": True}), ("pp2", {})]
)
def test_two_runs_write_the_same_bytes(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Every file of both checkpoints, but for the manifest's name of the run and its time."""
    ranks, layout = LAYOUTS[name]
    small = {"train_iters": 4, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 2, "num_layers": 2}
    run_values, digests, manifests = config(NEOX, small, layout, overrides, save=str(tmp_path / "run")), [], []
    for n in range(2):
        run_ranks(disturbed_run, ranks, run_values, n)
        folder = (tmp_path / "run").rename(tmp_path / f"run{n}")
        files = [p for p in folder.glob("global_step*/**/*") if p.is_file() and p.name != "manifest.json"]
        digests.append({p.relative_to(folder): hashlib.sha256(p.read_bytes()).digest() for p in files})
        manifests.append(json.loads((folder / "global_step4" / "manifest.json").read_text()))
    assert len(digests[0]) >= 20 and [p for p in digests[0] if digests[0][p] != digests[1].get(p)] == []
    first_manifest, second_manifest = manifests
    assert {key for key in first_manifest if first_manifest[key] != second_manifest[key]} <= {
        "run_id",
        "created",
        "checksum",
    }


# -- bf16 with fp32 master weights and fp32 accumulation


def in_precision(precision: str, **overrides: Any) -> dict[str, Any]:
    return config(LLAMA, precision=precision, train_micro_batch_size_per_gpu=4, **overrides)


@pytest.fixture(scope="module")
def fp32() -> list[float]:
    return run_ranks(curves, 1, [in_precision("fp32")], 20)[0][0].losses


@pytest.mark.parametrize("name", cells(["tp2"], product=["zero3", "pp2"]))
def test_bf16_with_fp32(name: str, fp32: list[float]) -> None:
    ranks, layout = LAYOUTS[name]
    bf16 = run_ranks(curves, ranks, [in_precision("bfloat16", **layout)], 20)[0][0].losses
    # A value is off by up to 2^-9 = 2e-3, which mostly cancels in a step's 256 tokens: 2.6e-4 at worst.
    assert bf16 == pytest.approx(fp32, rel=1e-3) and bf16 != fp32
    assert fp32[-1] < fp32[0] - 0.1, "or they would say little"


@pytest.mark.parametrize("name", ["plain", "zero3"])
def test_master_weights_start_from_fp32_values(name: str) -> None:
    """Not from values rounded to bf16, as DeepSpeed makes them."""
    ranks, layout = LAYOUTS[name]
    for exact, masters in run_ranks(curves, ranks, [in_precision(p, **layout) for p in ("fp32", "bfloat16")], 0):
        assert bit_equal(exact.weights, masters.weights)


# -- recomputation
ON = {"checkpoint_activations": True}
SELECTIVE = {**ON, "recompute_granularity": "selective"}
FORMS: dict[str, dict[str, Any]] = {
    "full": ON, "every other block": {**ON, "recompute_every": 2}, "pairs": {**ON, "checkpoint_num_layers": 2},
    "every other pair": {**ON, "checkpoint_num_layers": 2, "recompute_every": 2},
    "selective": SELECTIVE, "selective in every other block": {**SELECTIVE, "recompute_every": 2},
}  # fmt: skip
DROPOUT, COMPILED = {"hidden_dropout": 0.1, "attention_dropout": 0.1}, {"compile": "block"}


def trained(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[runs.Part]:
    """For the pool. Graphs are run operator by operator, so that bits can be compared."""
    torch.compile = partial(torch.compile, backend="aot_eager")  # of blocks and of what is done to logits
    return curves(rank, world_size, configs, 3)


@pytest.mark.parametrize(("layout", "keys"), cells(
    [("plain", DROPOUT)],
    [("pp2", {})],
    [("zero3", COMPILED), ("zero3", {"precision": "bfloat16"}), ("tp2 sp", COMPILED | DROPOUT),
     ("zero3, deepspeed", DROPOUT)],
))  # fmt: skip
def test_training_is_bit_equal(layout: str, keys: dict[str, Any]) -> None:
    world, layout_keys = runs.TABLE[layout]
    forms = [{}, *(FORMS[name] for name in ("full", "every other block", "selective"))]  # they differ in what runs when
    configs = [config(LLAMA, layout_keys, keys, form, train_micro_batch_size_per_gpu=2) for form in forms]
    for baseline, *recomputed in run_ranks(trained, world, configs):
        for curve in recomputed:
            assert curve.losses == baseline.losses and curve.norms == baseline.norms
            assert bit_equal(curve.weights, baseline.weights)


def products(**values: Any) -> int:
    args = small(num_layers=5, activation="relu", **values)
    stage, batch = make_stage(args, random_weights(args)).train(), random_batch(args)
    with FlopCounterMode(display=False) as counter:
        stage(None, batch).sum().backward()
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    return sum(counts.get(operator, 0) for operator in ("aten.mm", "aten.addmm"))


@pytest.mark.parametrize("form", FORMS)
def test_the_share_of_products_that_run_again(form: str) -> None:
    args = small(num_layers=5, **FORMS[form])
    tokens, hidden = 2 * args.seq_length, args.hidden_size
    block, last = 2 * tokens * 12 * hidden**2, 2 * tokens * 4 * hidden**2
    extra_products = products(**FORMS[form]) - products()
    # A group that is run again ends before its last product, which no gradient needs.
    groups = len(range(0, -(-5 // args.checkpoint_num_layers), args.recompute_every)) if extra_products else 0
    assert extra_products + groups * last == recomputed_product_share(args) * 5 * block
