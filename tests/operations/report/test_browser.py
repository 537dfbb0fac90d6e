"""Pages opened in Chromium: every plot has points, nothing is complained of, nothing is fetched."""

import json
from pathlib import Path

import pytest

from megatron.operations.report import write_report
from tests.operations.report.chromium import open_page
from tests.operations.report.pages import rows_of, titles, write_run
from tests.pool import run_ranks
from tests.training.preference.test_pairs_train import pairs
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

pytestmark = pytest.mark.browser


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
    values = config(LLAMA, ADAMW, pairs(tmp_path), {"data_path": None, "split": None, "eod_mask_loss": False},
                    train_impl="dpo", dataset_impl="pairwise", pack_impl="best_fit", dpo_loss_type="simpo",
                    dpo_beta=2.0, train_batch_size=4, train_iters=6, checkpoint_factor=3, eval_iters=1, eval_interval=3,
                    num_layers=1, save=str(tmp_path / "run"))  # fmt: skip
    values = {key: value for key, value in values.items() if value is not None}
    run_ranks(run_to_end, 1, values)
    page = write_report([tmp_path / "run"])
    assert check(page, 1200) == check(page, 500) >= 8
    others = [write_run(tmp_path / name, rows_of(2000), values) for name in ("one", "two")]
    assert check(write_report([tmp_path / "run", *others], tmp_path / "compared.html")) > 8
    shown = open_page(page)["plots"][0]["curves"]
    assert shown["event save"] == [[2, 2]] and shown["event stop"] == [[1, 1]]


@pytest.mark.parametrize("width", [1200, 500])
def test_the_load_of_experts_a_layer_at_a_time(width: int, tmp_path: Path) -> None:
    values = config(LLAMA, ADAMW, train_iters=6, checkpoint_factor=6, save=str(tmp_path / "run"), moe_num_experts=8,
                    moe_top_k=2, moe_router_type="topk", moe_layer_freq=[0, 1], moe_intermediate_size=16)  # fmt: skip
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
