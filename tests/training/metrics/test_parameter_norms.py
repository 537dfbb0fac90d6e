"""Norms of single parameters are those of the whole parameter, the same in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LAYOUTS, NEOX, begin, config, run_to_end

KEYS = ("log_param_norm", "log_grad_norm", "log_grad_pct_zeros", "log_optimizer_states")
PREFIXES = ("parameter_norms/", "gradient_norms/", "pct_grad_zeros/", "optimizer_state_norms/")
CELLS = {
    **{name: layout for name, layout in LAYOUTS.items() if name != "plain"},
    "tp2 x pp2 tied": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2, "no_weight_tying": False}),
    "dp2 x pp2": (4, {"pipe_parallel_size": 2}),
    "zero2 offloaded": (
        2,
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "CPU_Torch_Adam", "params": ADAMW["optimizer"]["params"]},
        },
    ),
    "tp2 bf16": (2, {"model_parallel_size": 2, "precision": "bfloat16"}),
    "zero1 bf16": (2, {"zero_optimization": {"stage": 1}, "precision": "bfloat16"}),
    "zero3 bf16": (2, {"zero_optimization": {"stage": 3}, "precision": "bfloat16"}),
}


def rows_of(folder: Path, layout: dict[str, Any], ranks: int) -> list[dict[str, float]]:
    """Rows of metrics.jsonl of four steps, every second logged."""
    given = config(
        NEOX, ADAMW, layout, dict.fromkeys((*KEYS, "log_gradient_noise_scale"), True), train_iters=4, num_layers=2,
        train_micro_batch_size_per_gpu=2, log_dir=str(folder), log_interval=2, gradient_noise_scale_n_batches=2,
    )  # fmt: skip
    run_ranks(run_to_end, ranks, given)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def norms_of(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(PREFIXES) or name == "train/noise_scale"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, str], list[dict[str, float]]]:
    rows_by_case = {}
    for untied in (True, False):
        for precision in ("fp32", "bfloat16") if untied else ("fp32",):
            folder, layout = tmp_path_factory.mktemp("one"), {"no_weight_tying": untied, "precision": precision}
            rows_by_case[untied, precision] = rows_of(folder, layout, 1)
    return rows_by_case


@pytest.mark.parametrize("name", with_more(CELLS, "tp2", "pp2", "zero3", "dp2 x pp2", product=["dp2", "zero1", "zero2"]))
def test_same_in_every_layout(name: str, one_process: dict[Any, list[dict[str, float]]], tmp_path: Path) -> None:
    ranks, layout = CELLS[name]
    layout = {"no_weight_tying": True, "precision": "fp32", **layout}
    rows, expected = rows_of(tmp_path, layout, ranks), one_process[layout["no_weight_tying"], layout["precision"]]
    assert [row["iteration"] for row in rows] == [2, 4], "only logged steps"
    tolerance = 2e-2 if layout["precision"] == "bfloat16" else 1e-4
    for row, other in zip(rows, expected, strict=True):
        ours, theirs = norms_of(row), norms_of(other)
        noise = (ours.pop("train/noise_scale"), theirs.pop("train/noise_scale"))
        if layout["precision"] == "fp32":
            assert noise[0] == pytest.approx(noise[1], rel=1e-3)
        assert ours.keys() == theirs.keys()
        for metric, value in ours.items():
            # A gradient that is 0 up to rounding (of a key's bias, the second moment of it) is noise beside
            # the others, and bf16 rounds one element in 32 to 0 or not.
            noise_floor = 1e-3 * tolerance + 1e-7
            if metric.startswith("pct"):
                noise_floor = 7.0 if tolerance > 1e-3 else 1.5 if "query_key_value.bias" in metric else 0.0
            assert value == pytest.approx(theirs[metric], rel=tolerance, abs=noise_floor), metric
        whole = sum(value**2 for metric, value in ours.items() if metric.startswith("gradient_norms/")) ** 0.5
        assert whole == pytest.approx(row["train/grad_norm"], rel=1e-4 if tolerance < 1e-3 else 1e-2)


def unwaiting_steps(rank: int, world_size: int, values: dict[str, Any]) -> list[str]:
    """For the pool: two free steps, then three in which only the values of a logged step may be waited
    for."""
    from tqdm import tqdm

    from megatron.callbacks import Step
    from megatron.training.callbacks.gradient_probes import build_probes
    from megatron.training.callbacks.log import LogCallback
    from megatron.training.loop import batches_of
    from megatron.training.loop_state import Stopwatch
    from tests.training.test_host_sync import ENGINE, forbid

    training = begin(values)
    batches, progress = batches_of(training), training.progress
    probes, gradients = build_probes(training)
    log = LogCallback(training, tqdm(disable=True), Stopwatch(), probes=probes)
    for i in range(5):
        if i == 2:
            forbid(ENGINE, [])
        step = next(batches)
        show = gradients.on_step_start(training, step)
        result = training.engine.train_step(step, training.schedule(progress.iteration), show)
        progress.iteration += 1
        log.on_step_end(training, Step(progress.iteration, 8 * progress.iteration, 32, result))
    return log.probed


@pytest.mark.parametrize("name", with_more(["plain", "pp2", "zero2", "zero3"], "plain", "zero2"))
def test_measuring_does_not_wait(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    given = config(
        NEOX, layout, dict.fromkeys((*KEYS, "log_gradient_noise_scale"), True), train_micro_batch_size_per_gpu=4,
        gradient_noise_scale_n_batches=2,
    )  # fmt: skip
    everyone = run_ranks(unwaiting_steps, ranks, given)
    assert all(names == everyone[0] and "train/noise_scale" in names for names in everyone)


def directly(rank: int, world_size: int, given: dict[str, Any]) -> dict[str, float]:
    """For the pool: what torch says of the same model after one step, without the engine's help."""
    from megatron.training.loop import batches_of

    training = begin(given)
    stage = training.engine.stage
    batches = next(batches_of(training))
    loss = torch.zeros(())
    weight = sum(float(batch.loss_weights.sum()) for batch in batches)
    for batch in batches:
        losses = torch.nn.functional.cross_entropy(
            stage(None, batch).float().flatten(0, 1),
            batch.labels.t().flatten(),
            reduction="none",  # type: ignore
        )
        loss = loss + (losses * batch.loss_weights.t().flatten()).sum() / weight
    loss.backward()
    norms = {}
    for full_name, param in stage.named_parameters():
        name = full_name.removeprefix("layers.")
        assert param.grad is not None
        norms[f"gradient_norms/{name}"] = float(param.grad.norm())
        norms[f"pct_grad_zeros/{name}"] = 100.0 * float((param.grad == 0).double().mean())
        # AdamW's first step from nothing: exp_avg is (1 - beta1) of the clipped gradient.
        norms[f"optimizer_state_norms/{name}_exp_avg"] = 0.1 * float(param.grad.norm())
    training.engine.close()
    return norms


def test_against_torch(tmp_path: Path) -> None:
    given = config(
        NEOX, dict.fromkeys(KEYS, True), train_iters=1, num_layers=2, train_micro_batch_size_per_gpu=4,
        gradient_clipping=0.0, log_dir=str(tmp_path),
    )  # fmt: skip
    run_ranks(run_to_end, 1, given)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    for metric, value in run_ranks(directly, 1, given)[0].items():
        assert row[metric] == pytest.approx(value, rel=1e-4, abs=1e-7), metric
    assert "parameter_norms/2.attention.query_key_value.weight" in row
    assert (
        "optimizer_state_norms/4.norm.weight_exp_avg_sq" in row
        or "optimizer_state_norms/5.norm.weight_exp_avg_sq" in row
    )
