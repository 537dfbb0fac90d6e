"""W&B and Comet: offline runs of the real libraries where they are installed, and what they are told, of
stand-ins."""

from __future__ import annotations

import json
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.metrics.loggers import build_loggers
from tests.pool import run_ranks
from tests.training.runs import NEOX, config

FACTS = {"git_hash": "abc1234", "total_params": 10}
ROW = {
    "iteration": 3,
    "consumed_samples": 24,
    "train/lm_loss": 2.5,
    "runtime/iteration_time": 0.5,
    "curriculum_seqlen": 8,
}
METRICS = {name: value for name, value in ROW.items() if name not in ("iteration", "consumed_samples")}
RUN = "0123456789abcdef0123456789abcdef"


class Recorder:
    """Stands for a tracker's library: notes every call on it, by path."""

    def __init__(self, calls: list[Any], path: str = "") -> None:
        self._calls, self._path = calls, path

    def __getattr__(self, name: str) -> Recorder:
        return Recorder(self._calls, f"{self._path}.{name}".lstrip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> Recorder:
        self._calls.append((self._path, args, kwargs))
        return Recorder(self._calls, f"{self._path}()")


def calls_of(monkeypatch: pytest.MonkeyPatch, library: str, rank: int = 0, **keys: Any) -> list[Any]:
    """Everything said to a tracker in a run of one row."""
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, library, Recorder(calls))
    args = NeoXArgs.from_dict(config(NEOX, **keys))
    for logger in build_loggers(args, 0, RUN, FACTS, rank):
        logger.write(ROW)
        logger.close()
    return calls


def test_comet_is_told_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(
        monkeypatch, "comet_ml", use_comet=True, comet_workspace="w", comet_project="p", comet_experiment_name="n",
        comet_tags=["a", "b"], comet_others={"cluster": "x"},
    )  # fmt: skip
    names = [path for path, _, _ in calls]
    assert names == [
        "ExperimentConfig",
        "start",
        *(f"start().{n}" for n in ("log_parameters", "log_others", "log_metrics", "end")),
    ]
    calls_by_path = {path: (args, kwargs) for path, args, kwargs in calls}
    assert calls_by_path["ExperimentConfig"][1].items() >= {"name": "n", "tags": ["a", "b"]}.items()
    expected = {"workspace": "w", "project": "p", "experiment_key": RUN, "mode": "get_or_create", "online": True}
    assert calls_by_path["start"][1].items() >= expected.items()
    assert calls_by_path["start().log_parameters"][0][0].items() >= {**FACTS, "hidden_size": 32}.items()
    assert calls_by_path["start().log_others"][0] == ({"cluster": "x"},)
    assert calls_by_path["start().log_metrics"] == ((METRICS,), {"step": 3})


def test_wandb_is_told_once_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = calls_of(monkeypatch, "wandb", use_wandb=True, wandb_group="g", wandb_mode="offline", log_dir=str(tmp_path))
    assert [path for path, _, _ in calls] == ["Settings", "init", "init().log", "init().finish"]
    init = calls[1][2]
    assert init.items() >= {"id": RUN, "group": "g", "mode": "offline", "dir": str(tmp_path), "resume": "allow"}.items()
    assert init["config"].items() >= {**FACTS, "hidden_size": 32}.items()
    assert calls[2][1:] == ((METRICS,), {"step": 3})


def test_wandb_runs_of_all_ranks_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(monkeypatch, "wandb", rank=1, use_wandb=True) == []
    inits = [calls_of(monkeypatch, "wandb", r, use_wandb=True, wandb_init_all_ranks=True)[1][2] for r in (0, 1)]
    assert [init["id"] for init in inits] == [RUN, f"{RUN}-rank1"]
    assert {init["group"] for init in inits} == {RUN}


@pytest.mark.parametrize(("key", "library"), [("use_wandb", "wandb"), ("use_comet", "comet_ml")])
def test_what_to_install(monkeypatch: pytest.MonkeyPatch, key: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    extra = "wandb" if key == "use_wandb" else "comet"
    with pytest.raises(ConfigError, match=rf"pip install 'neox\[{extra}\]'"):
        build_loggers(NeoXArgs.from_dict(config(NEOX, {key: True})), 0, RUN, FACTS)


def test_comet_offline_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", Recorder([]))
    with pytest.raises(ConfigError, match="comet_mode: offline writes into log_dir"):
        build_loggers(NeoXArgs.from_dict(config(NEOX, use_comet=True, comet_mode="offline")), 0, RUN, FACTS)


def test_wandb_says_why_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception):
        pass

    def init(**kwargs: Any) -> None:
        raise Error("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Error, Settings=lambda **k: None))
    with pytest.raises(ConfigError, match=r"use_wandb: No API key configured \(or set wandb_mode: offline\)"):
        build_loggers(NeoXArgs.from_dict(config(NEOX, use_wandb=True)), 0, RUN, FACTS)


def test_tensorboard_gets_one_event_a_step(tmp_path: Path) -> None:
    args = NeoXArgs.from_dict(config(NEOX, tensorboard_dir=str(tmp_path)))
    for logger in build_loggers(args, 0, RUN, FACTS):
        logger.write(ROW)
        logger.close()
    (file,) = tmp_path.iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert [event.step for event in events] == [0, 3]
    assert "abc1234" in events[0].summary.value[0].tensor.string_val[0].decode()
    assert {value.tag: value.tensor.float_val[0] for value in events[1].summary.value} == METRICS


def started_twice(rank: int, world_size: int, keys: dict[str, Any]) -> None:
    """For the pool: a run and its restart, as the real library sees them."""
    args = NeoXArgs.from_dict(config(NEOX, keys))
    for start in (0, 1):
        for logger in build_loggers(args, start, RUN, FACTS):
            logger.write({**ROW, "iteration": start + 1})
            logger.close()


@pytest.mark.skipif(find_spec("comet_ml") is None, reason="comet-ml is not installed")
def test_comet_offline_for_real(tmp_path: Path) -> None:
    keys = {"use_comet": True, "comet_mode": "offline", "comet_project": "p", "comet_tags": ["a"]}
    run_ranks(started_twice, 1, keys | {"log_dir": str(tmp_path)}, env={"COMET_LOGGING_CONSOLE": "ERROR"})
    archives = sorted(tmp_path.glob(f"{RUN}*.zip"), key=lambda path: path.stat().st_mtime_ns)
    metrics_by_archive = []
    for archive in archives:
        with zipfile.ZipFile(archive) as content:
            lines = content.read("messages.json").decode().splitlines()
        metrics = [payload["metric"] for line in lines if (payload := json.loads(line)["payload"]).get("metric")]
        metrics_by_archive.append({(metric["metricName"], metric["step"]): metric["metricValue"] for metric in metrics})
    assert len(metrics_by_archive) == 2, "an archive a start"
    for step, logged in enumerate(metrics_by_archive, 1):
        assert {name: logged.get((name, step)) for name in METRICS} == METRICS


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_for_real(tmp_path: Path) -> None:
    keys = {"use_wandb": True, "wandb_mode": "offline", "wandb_project": "p", "log_dir": str(tmp_path)}
    run_ranks(started_twice, 1, keys, env={"WANDB_SILENT": "true"})
    runs = list((tmp_path / "wandb").glob(f"offline-run-*/run-{RUN}.wandb"))
    assert runs, "one run before and after"
    assert all(name.encode() in path.read_bytes() for path in runs for name in METRICS)
