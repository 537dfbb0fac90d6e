"""Pages opened in Chromium: every plot has points, nothing is complained of, nothing is fetched."""

import json
from pathlib import Path

import pytest

from megatron.operations.report import write_report
from tests.methods.preferences.test_pairs_train import pairs
from tests.operations.report.chromium import open_page, open_sound_page
from tests.operations.report.pages import rows_of, titles, write_run
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

pytestmark = pytest.mark.browser


def check(page: Path, width: int = 1200) -> int:
    """The number of plots, each of which shows its curves, alone and after clicks on all boxes."""
    answers = open_sound_page(page, width)
    assert len(answers["plots"]) == len(answers["clicked"]) == len(titles(page))
    for plot in (*answers["plots"], *answers["clicked"]):
        assert plot["width"] > 0.55 * min(width, 500) and plot["height"] > 150
        assert plot["curves"]["curve"] and all(
            num_visible == num_points > 0 for num_visible, num_points in plot["curves"]["curve"]
        ), plot
    for plot in answers["clicked"]:
        assert not [name for name in plot["curves"] if name.startswith("event")], "events are hidden by their boxes"
    assert any(plot["name"].endswith("-log") for plot in answers["clicked"]), "the losses have changed their scale"
    assert len(set(answers["zoomed"])) == 1 and answers["zoomed"][0] < answers["plots"][0]["to"]
    return len(answers["plots"])


def test_a_real_run_on_pairs_wide_and_narrow(tmp_path: Path) -> None:
    values = config(LLAMA, ADAMW, pairs(tmp_path), {"data_path": None, "split": None, "eod_mask_loss": False},
                    train_impl="dpo", dataset_impl="pairwise", pack_impl="best_fit", dpo_loss_type="simpo",
                    dpo_beta=2.0, train_batch_size=4, train_iters=6, checkpoint_factor=3, eval_iters=1, eval_interval=3,
                    num_layers=1, save=str(tmp_path / "run"))  # fmt: skip
    values = {key: value for key, value in values.items() if value is not None}
    run_ranks(run_to_end, 1, values)
    page = write_report([tmp_path / "run"])
    assert check(page, 1200) == check(page, 400) >= 8
    compared_runs = [write_run(tmp_path / name, rows_of(2000), values) for name in ("one", "two")]
    assert check(write_report([tmp_path / "run", *compared_runs], tmp_path / "compared.html")) > 8
    curves = open_page(page)["plots"][0]["curves"]
    assert curves["event save"] == [[2, 2]] and curves["event stop"] == [[1, 1]]


@pytest.mark.parametrize("width", [1200, 400])
def test_the_load_of_experts_a_layer_at_a_time(width: int, tmp_path: Path) -> None:
    values = config(LLAMA, ADAMW, train_iters=6, checkpoint_factor=6, save=str(tmp_path / "run"), moe_num_experts=8,
                    moe_top_k=2, moe_router_type="topk", moe_layer_freq=[0, 1], moe_intermediate_size=16)  # fmt: skip
    run_ranks(run_to_end, 1, values)
    answers = open_sound_page(write_report([tmp_path / "run"]), width)
    first_map, clicked_map = answers["plots"][-1], answers["clicked"][-1]
    assert first_map["name"] == clicked_map["name"] == "load-0"
    assert (first_map["names"], clicked_map["names"]) == (["layer 3"], ["layer 5"])
    for load_map in (first_map, clicked_map):
        assert load_map["curves"] == {"load": [[1, 1]]} and (load_map["low"], load_map["high"]) == (-0.5, 7.5)
        assert load_map["width"] > 0.6 * width and load_map["height"] > 80
    assert len(set(answers["zoomed"])) == 1, "with the curves"
    assert "Experts without a token" in answers["text"] and "6 logged steps; 8 experts" in answers["text"]


def test_hostile_text_runs_no_script(tmp_path: Path) -> None:
    hostile = "</script><script>console.error('run')</script><img src=x onerror=\"console.error('run')\">"
    rows = rows_of(3, lambda step: {f"train/{hostile}": 1.0})
    save = write_run(tmp_path / "a", rows, None, {"status": "failed", "reason": hostile, "iteration": 3})
    (save / "demo_outputs").mkdir()
    (save / "demo_outputs" / "step0.jsonl").write_text(json.dumps({"prompt": hostile, "answer": hostile}) + "\n")
    assert check(write_report([save])) == 3
