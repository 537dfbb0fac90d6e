"""The page of a pipeline, opened in Chromium: every stage, its verdict and curves, nothing fetched."""

from pathlib import Path

import pytest

from tests.operations.report.chromium import open_page
from tests.pipelines.small import GATES, STAGES, pipeline, write_small, write_yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that its second gate has stopped, and that a person has overridden."""
    made = write_small(tmp_path_factory.mktemp("page") / "p<b>")
    write_yaml(made / "gates.yml", {**GATES, "sft": {"require": [{"metric": "train/lm_loss", "max": 0.5}]}})
    assert pipeline("run", made).returncode == 3
    assert pipeline("override", made, "sft", "--reason", "<script>document.title = 'x'</script>").returncode == 0
    return made


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 500])
def test_it_shows_all_stages(folder: Path, width: int) -> None:
    found = open_page(folder / "pipeline.html", width)
    assert found["problems"] == [] and found["console"] == [] and found["loaded"] == []
    assert found["width"] <= width, "nothing reaches over the edge"
    assert found["title"] == "p<b>"
    shown = ("CC0-1.0", "max 0.5", "fail", "promoted", "waiting", "<script>document.title = 'x'</script>")
    for words in (*(f"\n{stage}\n" for stage in STAGES), *shown):
        assert words in found["text"], words
    drawn = {plot["name"]: plot["curves"] for plot in found["plots"]}
    assert set(drawn) == {"pretrain-plot-0", "sft-plot-0"}
    for curves in drawn.values():
        (inside, points), *_ = curves["curve"]
        assert inside == points > 0
