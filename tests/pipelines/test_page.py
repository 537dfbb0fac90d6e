"""The page of a pipeline, opened in Chromium: every stage, its verdict and curves, nothing fetched."""

from pathlib import Path

import pytest

from tests.operations.report.chromium import open_sound_page
from tests.pipelines.small import GATES, STAGES, pipeline, write_small, write_yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that its second gate has stopped, and that a person has overridden."""
    pipeline_folder = write_small(tmp_path_factory.mktemp("page") / "p<b>")
    write_yaml(pipeline_folder / "gates.yml", {**GATES, "sft": {"require": [{"metric": "train/lm_loss", "max": 0.5}]}})
    assert pipeline("run", pipeline_folder).returncode == 3
    assert (
        pipeline("override", pipeline_folder, "sft", "--reason", "<script>document.title = 'x'</script>").returncode
        == 0
    )
    return pipeline_folder


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_it_shows_all_stages(folder: Path, width: int) -> None:
    answers = open_sound_page(folder / "pipeline.html", width)
    assert answers["title"] == "p<b>"
    expected_texts = ("CC0-1.0", "max 0.5", "fail", "promoted", "waiting", "<script>document.title = 'x'</script>")
    for words in (*(f"\n{stage}\n" for stage in STAGES), *expected_texts):
        assert words in answers["text"], words
    curves_by_plot = {plot["name"]: plot["curves"] for plot in answers["plots"]}
    assert set(curves_by_plot) == {"pretrain-plot-0", "sft-plot-0"}
    for curves in curves_by_plot.values():
        (num_visible, points), *_ = curves["curve"]
        assert num_visible == points > 0
