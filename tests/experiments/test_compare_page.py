"""The page of `deepy.py compare`, of three real runs, opened in Chromium: wide, narrow, light and dark."""

from pathlib import Path

import pytest

import deepy
from tests.experiments.test_compare import evaluate
from tests.operations.report.chromium import open_sound_page
from tests.operations.report.pages import titles
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

pytestmark = pytest.mark.browser
GROUNDS = {False: "#ffffff", True: "#202124"}


def test_three_runs_compared_in_chromium(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, keys in (("base", {}), ("large", {"train_batch_size": 16}), ("slow", {"gradient_clipping": 0.1})):
        values = config(LLAMA, ADAMW, {"num_layers": 1, "train_iters": 8, "eval_iters": 1, "eval_interval": 2,
                        "checkpoint_factor": 8, "save": str(tmp_path / name)}, keys)  # fmt: skip
        run_ranks(run_to_end, 1, values)
        evaluate(tmp_path / name, tmp_path / name, [float(i % 3 == 0) for i in range(12)], iteration=8)
    page = tmp_path / "page.html"
    words = ["compare", *(str(tmp_path / name) for name in ("base", "large", "slow")), "--html", str(page)]
    for axis, last in (("step", 8), ("flops", None)):
        assert deepy.main([*words, "--by", axis]) == 0
        assert {"Loss: training", "Loss: validation", "Learning rate"} <= {*titles(page)}
        for dark, width in ((False, 1200), (True, 1200), (True, 400)):
            answers = open_sound_page(page, width, dark)
            assert len(answers["plots"]) == len(answers["clicked"]) == len(titles(page))
            for plot in (*answers["plots"], *answers["clicked"]):
                assert plot["ground"] == GROUNDS[dark] and plot["width"] > 0.55 * min(width, 500)
                curves = plot["curves"]["curve"]
                assert len(curves) in (3, 6) and all(num_visible == points > 0 for num_visible, points in curves), plot
            assert any(plot["name"].endswith("-log") for plot in answers["clicked"]), "by a click on their boxes"
            assert len(set(answers["zoomed"])) == 1 and answers["zoomed"][0] < answers["plots"][0]["to"]
            assert last is None or last < answers["plots"][0]["to"] < last + 1
            assert all(text in answers["text"] for text in ("gradient_clipping", "large - base", "McNemar", "quiz_acc"))
