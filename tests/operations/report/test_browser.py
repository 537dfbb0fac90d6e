"""Pages opened in Chromium: every plot has points, nothing is complained of, nothing is fetched."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron.operations.report import write_report
from tests.operations.report.chromium import open_page
from tests.operations.report.pages import Row, rows_of, titles, write_run
from tests.pool import run_ranks
from tests.training.preference.test_pairs_train import pairs
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

pytestmark = pytest.mark.browser


def long_run(steps: int, seed: int) -> Iterable[Row]:
    """The rows of a run of the largest kind: devices, rewards, unlearning and scores are all in them."""
    dice = random.Random(seed)
    many = [f"device/{metric}_{kind}" for metric in ("utilization", "memory_gib", "power_watts")
            for kind in ("min", "mean", "max")]  # fmt: skip
    many += [f"train/rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    many += [f"train/{name}" for name in ("logps/chosen", "logps/rejected", "entropy", "ga_actual_loss",
             "gd_retain_loss", "loss_scale")]  # fmt: skip
    many += ["runtime/model_flops_utilization", "runtime/hardware_flops_utilization", "runtime/tokens_per_sec"]
    tasks = ("piqa", "arc_easy", "mmlu", "hellaswag")
    scores = [f"eval_tasks/{task}_{kind}" for task in tasks for kind in ("acc", "acc_norm")]

    def more(step: int) -> Row:
        row = {name: dice.random() for name in many}
        row["train/lm_loss"] = 9.0 if step == steps // 2 else 2.0 + 8.0 / step**0.5 + 0.05 * dice.random()
        row["train/learning_rate"] = 3e-4 * (1 - step / (steps + 1))
        row["train/skipped_steps"] = int(dice.random() < 0.001)
        row["runtime/start_time"] = 1.7e9 + 1000 * (step > steps // 3)
        if step % 1000 == 0:
            row |= {"validation/lm_loss": 2.0 + 8.0 / step**0.5, **{name: dice.random() for name in scores}}
        return row

    return rows_of(steps, more)


def check(page: Path, width: int = 1200) -> int:
    """The number of plots, each of which shows its curves, alone and after clicks on all boxes."""
    found = open_page(page, width)
    assert found["problems"] == [] and found["console"] == [] and found["loaded"] == []
    assert found["width"] <= width, "nothing reaches over the edge"
    assert len(found["plots"]) == len(found["clicked"]) == len(titles(page))
    for plot in (*found["plots"], *found["clicked"]):
        assert plot["width"] > 0.6 * min(width, 500) and plot["height"] > 150
        assert plot["curves"]["curve"] and all(inside == of > 0 for inside, of in plot["curves"]["curve"]), plot
    for plot in found["clicked"]:
        assert not [name for name in plot["curves"] if name.startswith("event")], "events are hidden by their boxes"
    assert any(plot["name"].endswith("-log") for plot in found["clicked"]), "the losses have changed their scale"
    assert len(set(found["zoomed"])) == 1 and found["zoomed"][0] < found["plots"][0]["to"]
    return len(found["plots"])


def test_a_real_run_on_pairs_wide_and_narrow(tmp_path: Path) -> None:
    values = config(
        LLAMA, ADAMW, pairs(tmp_path), {"data_path": None, "split": None, "eod_mask_loss": False}, train_impl="dpo",
        dataset_impl="pairwise", pack_impl="best_fit", dpo_loss_type="simpo", dpo_beta=2.0, train_batch_size=4,
        train_iters=6, checkpoint_factor=3, eval_iters=1, eval_interval=3, num_layers=1, save=str(tmp_path / "run"),
    )  # fmt: skip
    run_ranks(run_to_end, 1, {key: value for key, value in values.items() if value is not None})
    page = write_report([tmp_path / "run"])
    assert check(page, 1200) == check(page, 500) >= 8
    shown = open_page(page)["plots"][0]["curves"]
    assert shown["event save"] == [[2, 2]] and shown["event stop"] == [[1, 1]]


def test_a_run_of_100000_steps_and_three_of_them_compared(tmp_path: Path) -> None:
    runs = []
    for number, lr in enumerate((1e-3, 2e-3, 3e-3)):
        save = tmp_path / f"run{number}"
        values = config(LLAMA, save=str(save), checkpoint_factor=100, optimizer={"type": "Adam", "params": {"lr": lr}})
        runs.append(write_run(save, long_run(100_000, number), values))
    page = write_report(runs[:1])
    assert page.stat().st_size < 5e6
    assert check(page) > 10
    spike = open_page(page)["plots"][0]
    assert spike["high"] > 9.0 and spike["curves"]["event restart"] == [[1, 1]]
    compared = write_report(runs, tmp_path / "compared.html")
    assert compared.stat().st_size < 5e6 and "optimizer.params.lr" in compared.read_text()
    assert check(compared) > 25


@pytest.mark.parametrize("width", [1200, 500])
def test_the_load_of_experts_a_layer_at_a_time(width: int, tmp_path: Path) -> None:
    values = config(
        LLAMA, ADAMW, train_iters=6, checkpoint_factor=6, save=str(tmp_path / "run"), moe_num_experts=8, moe_top_k=2,
        moe_router_type="topk", moe_layer_freq=[0, 1], moe_intermediate_size=16,
    )  # fmt: skip
    run_ranks(run_to_end, 1, values)
    found = open_page(write_report([tmp_path / "run"]), width)
    assert found["problems"] == found["console"] == found["loaded"] == [] and found["width"] <= width
    before, after = found["plots"][-1], found["clicked"][-1]
    assert before["name"] == after["name"] == "load-0"
    assert (before["names"], after["names"]) == (["layer 3"], ["layer 5"])
    for shown in (before, after):
        assert shown["curves"] == {"load": [[1, 1]]} and (shown["low"], shown["high"]) == (-0.5, 7.5)
        assert shown["width"] > 0.6 * width and shown["height"] > 80
    assert len(set(found["zoomed"])) == 1, "with the curves"
    assert "Experts without a token" in found["text"] and "6 logged steps; 8 experts" in found["text"]


def test_hostile_text_runs_no_script(tmp_path: Path) -> None:
    hostile = "</script><script>console.error('run')</script><img src=x onerror=\"console.error('run')\">"
    rows = rows_of(3, lambda step: {f"train/{hostile}": 1.0})
    save = write_run(tmp_path / "a", rows, None, {"status": "failed", "reason": hostile, "iteration": 3})
    (save / "demo_outputs").mkdir()
    (save / "demo_outputs" / "step0.jsonl").write_text(json.dumps({"prompt": hostile, "answer": hostile}) + "\n")
    assert check(write_report([save])) == 3


def test_nothing_logged_and_one_row(tmp_path: Path) -> None:
    found = open_page(write_report([write_run(tmp_path / "empty", [])]))
    assert found["problems"] == found["console"] == found["loaded"] == [] and "plots" not in found
    assert check(write_report([write_run(tmp_path / "one", rows_of(1))])) == 2
