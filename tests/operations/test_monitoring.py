"""/metrics and /status of real runs, read as Prometheus reads them and compared with metrics.jsonl."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.operations.monitoring import Monitoring, gauge_name, phase_of
from megatron.training import train
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, begin, config

ROOT = Path(__file__).resolve().parents[2]


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read().decode()


def scrape(port: int) -> dict[str, float]:
    """The values of all gauges by name; of neox_state the state that is 1."""
    families = list(text_string_to_metric_families(fetch(port, "/metrics")))
    assert len({family.name for family in families}) == len(families)
    assert all(family.type == "gauge" for family in families)
    return {s.name + "".join(f":{v}" for v in s.labels.values()): s.value for f in families for s in f.samples}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]


class Scraper(Callback):
    """Asks after every step what the run says of itself, once its row must have been written."""

    def __init__(self, monitoring: Monitoring) -> None:
        self.port, self.seen = monitoring.port, list[tuple[dict[str, float], dict[str, Any]]]()

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        with run.pause():
            self.seen.append((scrape(self.port), json.loads(fetch(self.port, "/status"))))


def scraped_run(rank: int, world_size: int, values: dict[str, Any]) -> list[Any]:
    """For the pool: a run that is scraped from within after every step."""
    training = begin(values)
    monitoring = Monitoring(training.args)
    before = json.loads(fetch(monitoring.port, "/status")), scrape(monitoring.port)
    scraper = Scraper(monitoring)
    train(training, [monitoring, scraper])
    training.engine.close()
    try:
        fetch(monitoring.port, "/status")
    except urllib.error.URLError:
        return [before, scraper.seen]
    raise AssertionError("the port is still open after the run")


def test_a_scrape_says_what_metrics_jsonl_says(tmp_path: Path) -> None:
    values = config(LLAMA, ADAMW, save=str(tmp_path), train_iters=4, metrics_port=0, eval_interval=2, eval_iters=1,
                    checkpoint_factor=100)  # fmt: skip
    [[before, seen]] = run_ranks(scraped_run, 1, values | {"split": "80,20,0"})
    assert before == ({"status": "starting", "metrics": {}}, {"neox_state:starting": 1.0})
    rows = {row["iteration"]: row for row in rows_of(tmp_path) if "train/lm_loss" in row}
    known: dict[str, float] = {}
    for iteration, (gauges, status) in zip(range(5), seen, strict=True):
        known |= {name: value for name, value in rows.get(iteration, {}).items() if name.startswith("train/")}
        assert gauges["neox_iteration"] == status["iteration"] == iteration
        assert gauges["neox_train_iters"] == 4.0
        assert [name for name in gauges if "state" in name] == ["neox_state:training"] or iteration == 0
        assert {name: gauges[gauge_name(name)] for name in known} == known
        assert {name: status["metrics"][name] for name in known} == known
        assert status["status"] == "running" and len(status["run_id"]) == 32
        assert status["log_dir"] == str(tmp_path / "logs")
    gauges = seen[-1][0]
    assert gauges["neox_runtime_tokens_per_sec"] == rows[4]["runtime/tokens_per_sec"] > 0
    assert gauges["neox_validation_lm_loss"] in {row.get("validation/lm_loss") for row in rows_of(tmp_path)}
    assert gauges["neox_runtime_restarts"] == 0


def test_names_and_phases() -> None:
    assert gauge_name("train/lm_loss") == "neox_train_lm_loss"
    assert gauge_name("eval_tasks/mmlu_acc,none") == "neox_eval_tasks_mmlu_acc_none"
    assert [phase_of("running", text) for text in ("in the first step", "in step 12", "saving")] == [
        "training", "training", "saving",
    ]  # fmt: skip
    assert phase_of("failed", "in step 3") == "failed"


def command(files: list[str], *more: str) -> list[str]:
    return [sys.executable, "train.py", *files, "--set", *more]


@pytest.fixture
def file(tmp_path: Path) -> str:
    values = config(LLAMA, ADAMW, save=str(tmp_path / "run"), train_iters=400, checkpoint_factor=1000)
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    return str(tmp_path / "model.yml")


def test_a_taken_port_is_refused_before_the_run(file: str, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = subprocess.run(command([file], f"metrics_port={port}"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.fullmatch(
        rf"train\.py: error: --set: metrics_port: port {port} of 127\.0\.0\.1 cannot be opened \(Address already in "
        r"use\); set another, or metrics_host to an address of this machine", line,
    )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.neox_arguments import ConfigError, NeoXArgs

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"metrics_port: needs prometheus-client: pip install 'neox\[monitoring\]'"):
        Monitoring(NeoXArgs.from_dict(config(metrics_port=0)))


@pytest.mark.more
def test_train_py_answers_while_it_trains(file: str, tmp_path: Path) -> None:
    run = subprocess.Popen(command([file], "metrics_port=0"), cwd=ROOT, stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert run.stdout is not None
    port = next(int(m[1]) for line in run.stdout if (m := re.search(r"metrics: http://127\.0\.0\.1:(\d+)/", line)))
    scrapes: list[dict[str, float]] = []
    while run.poll() is None and len(scrapes) < 20:
        scrapes.append(scrape(port))
        time.sleep(0.05)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(port, "/")
    run.communicate()
    assert run.returncode == 0
    losses = {row["train/lm_loss"] for row in rows_of(tmp_path / "run") if "train/lm_loss" in row}
    shown = [s["neox_train_lm_loss"] for s in scrapes if "neox_train_lm_loss" in s]
    assert len(set(shown)) > 3 and set(shown) <= losses and all(map(math.isfinite, shown))
