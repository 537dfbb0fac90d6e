"""Pages of runs that are written here: what they show, how large they are, and what they refuse."""

import json
import logging
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, UserError, require_report
from megatron.operations.report import report_at_end, write_report
from megatron.operations.report.curves import thin
from megatron.operations.report.events import events_of
from megatron.operations.report.run_data import Series, read_runs
from tests.operations.report.pages import Row, figures, points, rows_of, table, titles, write_run
from tests.training.runs import LLAMA, config

MODEL = {**LLAMA, "checkpoint_factor": 100}
ROOT = Path(__file__).resolve().parents[3]


def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path: Path) -> None:
    line = '{"iteration": %d, "consumed_tokens": %d, "train/lm_loss": %g, "train/grad_norm": %g}\n'
    save = write_run(tmp_path / "a", [])
    with (save / "logs" / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            loss = 7.5 if step == 77_777 else 2.0 + 0.01 * (step % 10)
            file.write(line % (step, 256 * step, loss, math.sin(step)))
    page = write_report([save])
    assert page.stat().st_size < 5e6
    assert titles(page) == ["Loss", "Gradient norm"]
    plots = figures(page)
    assert len({figure.x_range.id for figure in plots}) == 1, "zoomed together"
    loss, *other_plots = [figure for figure in plots if not figure.name.endswith("-log")]
    (curve,) = points(loss)
    assert curve["y"].max() == 7.5 and curve["x"][np.argmax(curve["y"])] == 77_777
    assert len(curve["x"]) <= 2002 and curve["x"][0] == 1 and curve["x"][-1] == 100_000
    assert curve["tokens"][-1] == pytest.approx(256 * 100_000)
    assert f"{len(curve['x']):,} of 100,000 points" in page.read_text()
    (mean,) = points(loss, "mean")
    assert np.median(mean["y"]) == pytest.approx(2.045, rel=1e-3)
    assert all(len(points(figure)) == 1 for figure in other_plots)
    assert ["77,777", "spike"] in [row[:2] for row in table(page, "events")]


@pytest.mark.parametrize("count", [1, 2, 199, 200, 201, 1000, 12_345])
def test_a_thinned_curve_keeps_ends_and_extremes(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count)
    x = np.arange(count, dtype=np.float64)
    thinned = thin(Series(x, x, values), 200)
    assert len(thinned.values) <= 202 and (len(thinned.values) == count or count > 200)
    assert (np.diff(thinned.iterations) > 0).all() and (thinned.values == values[thinned.iterations.astype(int)]).all()
    assert {values.min(), values.max(), values[0], values[-1]} <= set(thinned.values)


def test_three_runs_lie_over_each_other_and_keys_that_differ_are_listed(tmp_path: Path) -> None:
    for name, lr in (("one", 1e-3), ("two", 2e-3), ("three", 1e-3)):
        values = config(MODEL, save=str(tmp_path / name), optimizer={"type": "Adam", "params": {"lr": lr}})
        extra_metrics = {"validation/lm_loss": 2.5, "eval_tasks/piqa_acc": 0.5, "eval_tasks/piqa_acc_stderr": 0.1}
        write_run(
            tmp_path / name,
            rows_of(20, lambda step, extra_metrics=extra_metrics: extra_metrics if step % 10 == 0 else {}),
            values,
        )
    page = write_report([tmp_path / name for name in ("one", "two", "three")], tmp_path / "compared.html")
    assert titles(page) == ["Loss: training", "Loss: validation", "Scores", "Gradient norm"]
    for figure in figures(page):
        lines = [part for part in figure.renderers if type(part.glyph).__name__ == "Line"]
        assert len({line.glyph.line_color for line in lines}) == 3
        assert [item.label.value for item in figure.legend[0].items] == ["one", "two", "three"]
    differing = {key: values for key, *values in table(page, "differing")}
    assert [value.split()[0] for value in differing["optimizer.params.lr"]] == ["0.001", "0.002", "0.001"]
    assert set(differing) == {"optimizer.params.lr", "lr", "save"}
    assert "piqa_acc_stderr" in page.read_text(), "in the table of scores"


class _Elements(HTMLParser):
    """Collects a page's elements, and the text outside scripts."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags, self.texts = list[str](), list[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)

    def handle_data(self, text: str) -> None:
        self.texts.append(text)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    rows = list(rows_of(3, lambda step: {f"train/{hostile}": 1.0, f"eval_tasks/{hostile}": 0.5}))
    values = config(MODEL, save=str(tmp_path / "a"), wandb_run_name=hostile)
    save = write_run(tmp_path / "a", rows, values, {"status": "failed", "reason": hostile, "iteration": 3})
    (save / "demo_outputs").mkdir()
    for step, answer in ((0, "plain"), (3, hostile)):
        line = {"messages": [{"role": "user", "content": hostile}], "answer": answer}
        (save / "demo_outputs" / f"step{step}.jsonl").write_text(json.dumps(line) + "\n")
    page = write_report([save])
    elements, harmless = _Elements(page), _Elements(write_report([write_run(tmp_path / "b", rows_of(3))]))
    assert elements.tags.count("script") == harmless.tags.count("script") and "img" not in elements.tags
    hostile_texts = [text for text in elements.texts if hostile in text]
    assert len(hostile_texts) >= 5, "prompt, answer, reason, configuration, score"
    assert any("alert(1)" in item.label.value for figure in figures(page) for item in figure.legend[0].items)


def test_whatever_a_run_has_left_makes_a_page(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", [])
    assert titles(write_report([empty])) == [] and "No metrics have been logged" in (empty / "report.html").read_text()
    single_row = write_run(tmp_path / "one", rows_of(1))
    assert [len(points(figure)[0]["x"]) for figure in figures(write_report([single_row]))] == [1] * 3
    odd = {3: math.nan, 4: math.inf, 5: -math.inf}
    rows = rows_of(9, lambda step: {"train/grad_norm": math.nan, "train/lm_loss": odd.get(step, 2.0)})
    bad = write_run(tmp_path / "bad", rows)
    file = bad / "logs" / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'\xff\x00\n{"iteration": 10, "train/lm_')
    page = write_report([file])
    assert titles(page) == ["Loss"]
    assert points(figures(page)[0])[0]["x"].tolist() == [1, 2, 6, 7, 8, 9]
    assert "3 NaN or infinite values are not drawn" in page.read_text()
    assert "Not plotted, because no value is finite: train/grad_norm" in page.read_text()
    assert page == bad / "logs" / "report.html", "no status.json says where it saves"
    compared = write_report([empty, single_row, bad], tmp_path / "all.html")
    assert "Configurations cannot be compared" in compared.read_text() and len(figures(compared)) == 3


def test_rewards_have_plots_of_their_own(tmp_path: Path) -> None:
    kinds = ("chosen", "rejected", "margins", "accuracies")
    pair_metrics = {f"train/rewards/{kind}": 0.5 for kind in kinds} | {"train/logps/chosen": -1.0}
    page = write_report([write_run(tmp_path / "a", rows_of(3, lambda step: pair_metrics))])
    linear = [figure for figure in figures(page) if not figure.name.endswith("-log")]
    plots = dict(zip(titles(page), linear, strict=True))
    assert {"Rewards", "Preference accuracy", "Log-probabilities of answers"} <= plots.keys()
    labels = [item.label.value for item in plots["Rewards"].legend[0].items]
    assert labels[:3] == ["rewards chosen", "rewards rejected", "rewards margins"]


def test_named_sets_and_sources_share_plots(tmp_path: Path) -> None:
    """Each set has its curve beside the validation loss; other metrics of sets share a plot, too."""
    losses = ("lm_loss", "web/lm_loss", "code/lm_loss", "ema/lm_loss", "ema/web/lm_loss")
    names = (*losses, "web/entropy", "code/entropy")
    metrics = {f"validation/{name}": 1.0 for name in names} | {"train/loss_by_source/web": 1.0}
    page = write_report([write_run(tmp_path / "a", rows_of(3, lambda step: metrics))])
    linear = [figure for figure in figures(page) if not figure.name.endswith("-log")]
    plots = dict(zip(titles(page), linear, strict=True))
    labels = {
        title: [item.label.value for item in plots[title].legend[0].items]
        for title in ("Loss", "Entropy", "Loss by source")
        if plots[title].legend
    }
    sets = ["validation web", "validation code", "validation ema", "validation ema web"]
    assert labels["Loss"][-5:] == ["validation", *sets]
    assert labels["Entropy"] == ["validation web entropy", "validation code entropy"] and "Loss by source" in plots


def test_perplexities_share_a_plot_with_a_log_scale(tmp_path: Path) -> None:
    names = ("validation/lm_loss_ppl", "test/lm_loss_ppl", "validation/lm_loss_char_lvl_ppl")
    run = write_run(tmp_path / "run", rows_of(10, lambda step: dict.fromkeys(names, 1000.0 / step)))
    page = write_report([run])
    assert titles(page).count("Perplexity") == 1 and not any("ppl" in title for title in titles(page))
    (figure,) = [figure for figure in figures(page) if figure.name == f"plot-{titles(page).index('Perplexity')}"]
    assert type(figure.y_scale).__name__ == "LogScale" and figure.visible
    curves = [source for source in figure.select({"name": "curve"}) if hasattr(source, "data")]
    assert len(curves) == 3


def test_events_are_found_in_rows_and_files(tmp_path: Path) -> None:
    def extra_metrics(step: int) -> Row:
        return {"runtime/start_time": 1.7e9 + 100 * (step > 40) + 100 * (step > 60), "runtime/restarts": int(step > 60),
                "train/skipped_steps": 2 * (step == 20), "train/spikes": int(step == 70),
                "train/lm_loss": 9.0 if step == 80 else 2.0 + 0.1 * (step % 3)}  # fmt: skip

    status = {"status": "stopped", "reason": "signal SIGTERM", "iteration": 100, "time": "2026-01-02T03:04:05+0000"}
    save = write_run(tmp_path / "a", rows_of(100, extra_metrics), None, status)
    for step, text in ((50, '{"created": "2026-01-02T03:04:05+00:00", "validation_loss": 2.5}'), (90, "{")):
        (save / f"global_step{step}").mkdir()
        (save / f"global_step{step}" / "manifest.json").write_text(text)
    (run,) = read_runs([save])
    assert [(event.iteration, event.kind, event.text) for event in events_of(run)] == [
        (0, "start", "first start"),
        (20, "skipped", "2 steps were skipped: loss or gradients not finite"),
        (40, "restart", "started again, continues after the logged iteration 40"),
        (50, "save", "global_step50, validation loss 2.5000"),
        (60, "restart", "restart 1 of deepy.py, continues after the logged iteration 60"),
        (70, "spike", "a step was skipped: loss far above the recent ones (skip_step_above_sigma)"),
        (80, "spike", "loss 9; mean of the recent losses 2.1"),
        (90, "save", "global_step90"),
        (100, "stop", "stopped: signal SIGTERM"),
    ]
    figure = figures(write_report([save]))[0]
    assert points(figure, "event restart")[0]["x"] == [40, 60]
    assert points(figure, "event save")[0]["x"] == [50, 90]


def test_what_cannot_be_reported_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = write_run(tmp_path / "a", rows_of(2))
    for paths, message in (
        ([tmp_path], "holds no run"), ([save, save / "logs"], "given twice"), ([tmp_path / "b"], "no such folder"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            write_report(paths)
    with pytest.raises(UserError, match=r"nowhere/a.html: the report cannot be written \(No such file"):
        write_report([save], tmp_path / "nowhere" / "a.html")
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(UserError, match=re.escape("pip install 'neox[report]'")):
        write_report([save])


def test_report_true_needs_bokeh_and_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    args = NeoXArgs.from_dict(config(MODEL, report=True))
    with pytest.raises(ConfigError, match="report: needs a folder"):
        require_report(args)
    require_report(args.replace(save="there"))
    monkeypatch.setattr("megatron.neox_arguments.optional_packages.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("report: needs bokeh: pip install 'neox[report]'")):
        require_report(args.replace(save="there"))
    require_report(args.replace(report=False))


def test_the_page_at_the_end_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = NeoXArgs.from_dict(config(MODEL, save=str(tmp_path / "gone")))
    with caplog.at_level(logging.WARNING):
        report_at_end(args, tmp_path / "gone" / "logs", logging.getLogger("report"))
    assert "report: true, but the report could not be written: ReportError" in caplog.text
    values = config(MODEL, save="s3://bucket/run", remote_staging=str(tmp_path / "staging"),
                    log_dir=str(tmp_path / "a"))  # fmt: skip
    logs = write_run(tmp_path / "run", rows_of(2)) / "logs"
    report_at_end(NeoXArgs.from_dict(values), logs, logging.getLogger("report"))
    assert len(figures(logs / "report.html")) == 3


def test_the_command_imports_no_torch_and_prints_where_the_page_is(tmp_path: Path) -> None:
    save = write_run(tmp_path / "a", rows_of(2), config(MODEL))
    code = (
        "import sys; from tools.report import main; code = main(sys.argv[1:]); "
        "sys.exit(2 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(save)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{save}/report.html\n", "")
