"""/metrics and /status of real runs, compared with metrics.jsonl, and the reading of a run's folders."""

import json
import math
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.operations.monitoring import Monitoring, gauge_name, phase_of
from megatron.operations.run_folder import RunFolderError, experiment_of, open_run
from megatron.training import train
from tests.launch.runs import ROOT, taken_port
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, begin, config, metric_rows, run_to_end


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read().decode()


def scrape(port: int) -> dict[str, float]:
    """The values of all gauges by name; of neox_state the state that is 1."""
    families = list(text_string_to_metric_families(fetch(port, "/metrics")))
    assert len({family.name for family in families}) == len(families)
    assert all(family.type == "gauge" for family in families)
    return {s.name + "".join(f":{v}" for v in s.labels.values()): s.value for f in families for s in f.samples}


class Scraper(Callback):
    """Asks after every step what the run says of itself, once its row must have been written."""

    def __init__(self, monitoring: Monitoring) -> None:
        self.port, self.scrapes = monitoring.port, list[tuple[dict[str, float], dict[str, Any]]]()

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        with run.pause():
            self.scrapes.append((scrape(self.port), json.loads(fetch(self.port, "/status"))))


def scraped_run(rank: int, world_size: int, values: dict[str, Any]) -> list[Any]:
    """For the pool: a run that is scraped from within after every step."""
    training = begin(values)
    monitoring = Monitoring(training.args)
    initial = json.loads(fetch(monitoring.port, "/status")), scrape(monitoring.port)
    scraper = Scraper(monitoring)
    train(training, [monitoring, scraper])
    training.engine.close()
    try:
        fetch(monitoring.port, "/status")
    except urllib.error.URLError:
        return [initial, scraper.scrapes]
    raise AssertionError("the port is still open after the run")


def test_a_scrape_says_what_metrics_jsonl_says(tmp_path: Path) -> None:
    values = config(LLAMA, ADAMW, save=str(tmp_path), train_iters=4, metrics_port=0, eval_interval=2, eval_iters=1,
                    checkpoint_factor=100)  # fmt: skip
    [[initial, scrapes]] = run_ranks(scraped_run, 1, values | {"split": "80,20,0"})
    assert initial == ({"status": "starting", "metrics": {}}, {"neox_state:starting": 1.0})
    rows = {row["iteration"]: row for row in metric_rows(tmp_path)}
    metrics: dict[str, float] = {}
    for iteration, (gauges, status) in zip(range(5), scrapes, strict=True):
        metrics |= {name: value for name, value in rows.get(iteration, {}).items() if name.startswith("train/")}
        assert gauges["neox_iteration"] == status["iteration"] == iteration
        assert gauges["neox_train_iters"] == 4.0
        assert [name for name in gauges if "state" in name] == ["neox_state:training"] or iteration == 0
        assert {name: gauges[gauge_name(name)] for name in metrics} == metrics
        assert {name: status["metrics"][name] for name in metrics} == metrics
        assert status["status"] == "running" and len(status["run_id"]) == 32
        assert status["log_dir"] == str(tmp_path / "logs")
    gauges, validation = scrapes[-1][0], metric_rows(tmp_path, "validation/lm_loss")
    assert gauges["neox_runtime_tokens_per_sec"] == rows[4]["runtime/tokens_per_sec"] > 0
    assert gauges["neox_validation_lm_loss"] in {row["validation/lm_loss"] for row in validation}
    assert gauges["neox_runtime_restarts"] == 0


def test_names_phases_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gauge_name("train/lm_loss") == "neox_train_lm_loss"
    assert gauge_name("eval_tasks/mmlu_acc,none") == "neox_eval_tasks_mmlu_acc_none"
    expected = ["training", "training", "saving"]
    assert [phase_of("running", text) for text in ("in the first step", "in step 12", "saving")] == expected
    assert phase_of("failed", "in step 3") == "failed"
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"metrics_port: needs prometheus-client: pip install 'neox\[monitoring\]'"):
        Monitoring(NeoXArgs.from_dict(config(metrics_port=0)))


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    values = config(LLAMA, ADAMW, save=str(tmp_path / "run"), train_iters=1000000, checkpoint_factor=1000)
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    return [sys.executable, "train.py", str(tmp_path / "model.yml"), "--set"]


def test_a_taken_port_is_refused_before_the_run(command: list[str], tmp_path: Path) -> None:
    with taken_port() as port:
        done = subprocess.run([*command, f"metrics_port={port}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.match(rf"train\.py: error: --set: metrics_port: port {port} .*127\.0\.0\.1.*in use", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.product
@pytest.mark.ends_processes
def test_train_py_answers_while_it_trains(command: list[str], tmp_path: Path) -> None:
    """The run is scraped until five of its losses were seen."""
    run = subprocess.Popen([*command, "metrics_port=0"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    port = next(int(m[1]) for line in run.stdout if (m := re.search(r"metrics: http://127\.0\.0\.1:(\d+)/", line)))
    scraped_losses: set[float] = set()
    while len(scraped_losses) < 5 and run.poll() is None:
        scraped_losses |= {value for name, value in scrape(port).items() if name == "neox_train_lm_loss"}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(port, "/")
    run.terminate()
    run.communicate(timeout=200)
    assert run.returncode == 0
    losses = {row["train/lm_loss"] for row in metric_rows(tmp_path / "run")}
    assert scraped_losses <= losses and all(map(math.isfinite, scraped_losses))


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps whose log folder lies elsewhere."""
    folder = tmp_path_factory.mktemp("run")
    keys = {"save": str(folder / "save"), "log_dir": str(folder / "elsewhere"), "train_iters": 3, "log_interval": 1,
            "checkpoint_factor": 3}  # fmt: skip
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, **keys))
    return folder / "save"


def test_a_run_is_found_by_each_of_its_folders(save: Path) -> None:
    logs = save.parent / "elsewhere"
    run = open_run(save)
    assert (run.save, run.logs) == (save, logs)
    assert open_run(logs).rows() == open_run(logs / "metrics.jsonl").rows() == run.rows()
    assert [row["iteration"] for row in run.rows() if "train/lm_loss" in row] == [1, 2, 3]
    assert run.status()["status"] == run.summary()["status"] == "finished" and run.status()["iteration"] == 3


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "status.json").write_text("{")
    refusals = {"empty": "holds no run", "absent": "no such folder"}
    for folder, reason in refusals.items():
        with pytest.raises(RunFolderError, match=reason):
            open_run(tmp_path / folder)
    run = open_run(tmp_path)
    assert run.status() == {} and "status.json: cannot be read" in run.problems.lines()[0]


@pytest.mark.parametrize(("save", "site", "name"), [
    ("/p/checkpoints/org/exp,a=1", "/p/checkpoints/org", "exp,a=1"),
    ("/p/checkpoints/org/exp/stage2", "/p/checkpoints/org", "exp"),
    ("/elsewhere/exp", "/p/checkpoints/org", "exp"),
    ("/elsewhere/exp", None, "exp"),
])  # fmt: skip
def test_experiment_of(save: str, site: str | None, name: str) -> None:
    assert experiment_of(save, site) == name
