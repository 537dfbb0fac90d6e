"""W&B and Comet: offline runs of the real libraries where they are installed; calls to stand-ins."""

import json
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.metrics.loggers import build_loggers
from tests.pool import run_ranks
from tests.training.runs import NEOX, config

FACTS = {"git_hash": "abc1234", "total_params": 10}
METRICS = {"train/lm_loss": 2.5, "runtime/iteration_time": 0.5, "curriculum_seqlen": 8}
ROW = {"iteration": 3, "consumed_samples": 24, **METRICS}
RUN = "0123456789abcdef0123456789abcdef"


def args_of(**keys: Any) -> NeoXArgs:
    return NeoXArgs.from_dict(config(NEOX, keys))


def write_one_row(args: NeoXArgs, rank: int = 0) -> None:
    for logger in build_loggers(args, 0, RUN, FACTS, rank):
        logger.write(ROW)
        logger.close()


def calls_of(monkeypatch: pytest.MonkeyPatch, library: str, rank: int = 0, **keys: Any) -> list[Any]:
    """Everything said to a tracker in a run of one row: (path, args, kwargs)."""
    tracker = Mock()
    monkeypatch.setitem(sys.modules, library, tracker)
    write_one_row(args_of(**keys), rank)
    return tracker.mock_calls


def test_comet_is_told_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"comet_workspace": "w", "comet_project": "p", "comet_experiment_name": "n", "comet_tags": ["a", "b"]}
    calls = calls_of(monkeypatch, "comet_ml", use_comet=True, comet_others={"cluster": "x"}, **keys)
    paths = ["ExperimentConfig", "start", "log_parameters", "log_others", "log_metrics", "end"]
    assert [path.removeprefix("start().") for path, _, _ in calls] == paths
    (_, _, experiment), (_, _, start), (_, (parameters,), _), (_, (other_facts,), _), metrics, _ = calls
    assert experiment.items() >= {"name": "n", "tags": ["a", "b"]}.items()
    expected = {"workspace": "w", "project": "p", "experiment_key": RUN, "mode": "get_or_create", "online": True}
    assert start.items() >= expected.items()
    assert parameters.items() >= {**FACTS, "hidden_size": 32}.items() and other_facts == {"cluster": "x"}
    assert metrics[1:] == ((METRICS,), {"step": 3})


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


@pytest.mark.parametrize(("tracker", "library"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_what_to_install(monkeypatch: pytest.MonkeyPatch, tracker: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"pip install 'neox\[{tracker}\]'"):
        write_one_row(args_of(**{f"use_{tracker}": True}))


def test_comet_offline_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="comet_mode: offline .*log_dir"):
        calls_of(monkeypatch, "comet_ml", use_comet=True, comet_mode="offline")


def test_wandb_says_why_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception):
        pass

    def init(**kwargs: Any) -> None:
        raise Error("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Error, Settings=lambda **k: None))
    with pytest.raises(ConfigError, match="use_wandb: .*No API key configured.*wandb_mode: offline"):
        write_one_row(args_of(use_wandb=True))


def test_tensorboard_gets_one_event_a_step(tmp_path: Path) -> None:
    write_one_row(args_of(tensorboard_dir=str(tmp_path)))
    (file,) = tmp_path.iterdir()
    facts, row = (event for event in EventFileLoader(str(file)).Load() if event.HasField("summary"))
    assert (facts.step, row.step) == (0, 3)
    assert "abc1234" in facts.summary.value[0].tensor.string_val[0].decode()
    assert {value.tag: value.tensor.float_val[0] for value in row.summary.value} == METRICS


def started_twice(rank: int, world_size: int, keys: dict[str, Any]) -> None:
    """For the pool: a run and its restart, as the real library sees them."""
    for start in (0, 1):
        for logger in build_loggers(args_of(**keys), start, RUN, FACTS):
            logger.write({**ROW, "iteration": start + 1})
            logger.close()


@pytest.mark.product
@pytest.mark.skipif(find_spec("comet_ml") is None, reason="comet-ml is not installed")
def test_comet_offline_for_real(tmp_path: Path) -> None:
    keys = {"use_comet": True, "comet_mode": "offline", "comet_project": "p", "log_dir": str(tmp_path)}
    run_ranks(started_twice, 1, keys, env={"COMET_LOGGING_CONSOLE": "ERROR"})
    steps = []
    for archive in tmp_path.glob(f"{RUN}*.zip"):
        with zipfile.ZipFile(archive) as content:
            payloads = [json.loads(line)["payload"] for line in content.read("messages.json").splitlines()]
        logged = [payload["metric"] for payload in payloads if payload.get("metric")]
        metrics = [metric for metric in logged if metric["metricName"] in METRICS]
        steps += {metric["step"] for metric in metrics}
        assert {metric["metricName"]: metric["metricValue"] for metric in metrics} == METRICS
    assert sorted(steps) == [1, 2], "an archive a start"


@pytest.mark.product
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_for_real(tmp_path: Path) -> None:
    keys = {"use_wandb": True, "wandb_mode": "offline", "wandb_project": "p", "log_dir": str(tmp_path)}
    run_ranks(started_twice, 1, keys, env={"WANDB_SILENT": "true"})
    runs = list((tmp_path / "wandb").glob(f"offline-run-*/run-{RUN}.wandb"))
    assert runs, "one run before and after"
    assert all(name.encode() in path.read_bytes() for path in runs for name in METRICS)
