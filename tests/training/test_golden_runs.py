"""Runs of the original system from its own checkpoints: the same data order, losses and rates."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.checkpointing import ParallelLayout, reshard
from tests.checkpointing.golden import golden_args
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, TABLE, Part, cells, curves


def golden_config(family: str, name: str, **overrides: Any) -> dict[str, Any]:
    values = yaml.safe_load((GOLDEN / family / name / f"{name}.yml").read_text().replace("GOLDEN/", f"{GOLDEN}/"))
    del values["save"]
    return {**values, "index_cache_dir": overrides.pop("cache"), **overrides}


def goes_on(values: dict[str, Any], ranks: int, steps: int = 3, rates: Sequence[float] = ()) -> Part:
    """The steps of a run's first rank."""
    return run_ranks(curves, ranks, [values], steps, rates)[0][0]


def _steps(family: str, name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / family / name / "steps.json").read_text())


@pytest.mark.parametrize(("family", "name", "ranks", "steps"), [
    ("ckpt_neox", "neox_pp1_mp1", 1, 3),
    ("ckpt_neox", "neox_pp0_mp1", 1, 3),
    ("ckpt_llama", "llama_pp1_mp1", 1, 3),
    # Its later losses carry its bugs: row biases move twice as fast, the clip norm leaves parameters out.
    ("ckpt_neox", "neox_pp2_mp2", 4, 1),
])  # fmt: skip
def test_losses_from_step_zero(family: str, name: str, ranks: int, steps: int, tmp_path: Path) -> None:
    load = str(GOLDEN / family / name / "ckpt")
    overrides = {"compat_ffn_width": "upstream"} if family == "ckpt_llama" else {}
    part = goes_on(golden_config(family, name, cache=str(tmp_path), load=load, iteration=0, **overrides), ranks)
    for i, golden in enumerate(_steps(family, name)[:steps]):
        assert part.losses[i] == pytest.approx(golden["metrics"]["lm_loss"], rel=1e-5)
        assert part.rates[i] == pytest.approx(golden["lr_used"][0], rel=1e-12)
        if ranks == 1:
            assert part.norms[i] == pytest.approx(golden["deepspeed_clip_total_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", cells(["plain", "pp2"], ["zero2"], ["plain, deepspeed", "tp2"]))
def test_gradient_ascent_of_the_fork(layout: str, tmp_path: Path) -> None:
    """At its rates: in its first step, where it has no max(1, step) of the warm-up, 0."""
    ranks, keys = TABLE[layout]
    keys = {**keys, "gradient_accumulation_steps": 1} if layout == "zero2" else keys
    load = str(GOLDEN / "ckpt_neox" / "neox_pp1_mp1" / "ckpt")
    values = golden_config("fork", "geo_ga_interleaved_pp1", cache=str(tmp_path), load=load, iteration=0, **keys)
    golden = _steps("fork", "geo_ga_interleaved_pp1")
    part = goes_on(values, ranks, len(golden), [step["lr_used"][0] for step in golden])
    assert part.losses == pytest.approx([step["metrics"]["lm_loss"] for step in golden], rel=1e-6)
    assert part.norms == pytest.approx([step["deepspeed_clip_total_norm"] for step in golden], rel=1e-6)
    assert [loss < 0 for loss in part.losses] == [False, False, True, False, True, False]


@pytest.mark.parametrize(("layout", "ranks"), [({}, 1), ({"zero_optimization": {"stage": 1}}, 2)])
def test_optimizer_state_of_neox_is_taken_up(layout: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """From step 3 on: with NeoX's moments the next steps are those of the run that never stopped."""
    load = str(GOLDEN / "ckpt_neox" / "neox_pp1_mp1" / "ckpt")
    overrides = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2 // ranks, **layout}
    values = golden_config("ckpt_neox", "neox_pp1_mp1", cache=str(tmp_path), load=load, **overrides)
    gone_on = goes_on({**values, "iteration": 3, "train_iters": 5}, ranks, 2)
    uninterrupted = goes_on({**values, "iteration": 0, "train_iters": 5}, ranks, 5)
    assert gone_on.losses == pytest.approx(uninterrupted.losses[3:], rel=1e-5)
    afresh = goes_on({**values, "iteration": 3, "train_iters": 5, "no_load_optim": True}, ranks, 2)
    assert abs(afresh.losses[1] - uninterrupted.losses[4]) > 1e-4, "without the moments the second loss must differ"


LAYOUTS: list[tuple[str, dict[str, Any], int]] = [
    ("as it was", {}, 4), ("one process", {"model_parallel_size": 1, "pipe_parallel_size": 0}, 1),
    ("ZeRO 3", {"model_parallel_size": 1, "pipe_parallel_size": 1, "zero_optimization": {"stage": 3}}, 2),
    ("tp2, ZeRO 1", {"pipe_parallel_size": 1, "zero_optimization": {"stage": 1}}, 4),
    ("pp2, ZeRO 1", {"model_parallel_size": 1, "zero_optimization": {"stage": 1}}, 4),
]  # fmt: skip


@pytest.mark.parametrize("count", cells([3], product=[5]))
def test_optimizer_state_of_a_pipeline_is_taken_up_in_every_layout_and_when_merged(count: int, tmp_path: Path) -> None:
    run, one_rank = "neox_pp2_mp2", ParallelLayout(1, 1, 1, 0, "fp32", 1)
    load = GOLDEN / "ckpt_neox" / run / "ckpt"
    merged = reshard(load / "global_step3", tmp_path / "merged", golden_args(run), one_rank).parent
    values = golden_config("ckpt_neox", run, cache=str(tmp_path), load=str(load), train_iters=5)
    afresh, losses_by_layout = goes_on({**values, "no_load_optim": True}, 4, 2).losses, {}
    for name, layout, ranks in LAYOUTS[:count]:
        data = ranks // (layout.get("model_parallel_size", 2) * max(layout.get("pipe_parallel_size", 2), 1))
        batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2 // data}
        losses_by_layout[name] = goes_on({**values, **layout, **batch}, ranks, 2).losses
        if ranks == 1:
            losses_by_layout["merged"] = goes_on({**values, **layout, **batch, "load": str(merged)}, 1, 2).losses
    expected = losses_by_layout["as it was"]
    assert expected[0] == afresh[0], "the first loss hangs on the weights alone"
    for name, losses in losses_by_layout.items():
        assert losses == pytest.approx(expected, rel=1e-5) and abs(losses[1] - afresh[1]) > 1e-4, name
