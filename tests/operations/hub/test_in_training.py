"""push_to_hub: a real run beside a Hub that hangs, refuses, or answers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.operations.hub.in_training import PushToHub, hub_repository
from megatron.process.metrics_file import read_metrics
from megatron.process.run_files import Problems
from tests.launch.runs import PIPED_OUTPUT, ROOT, wait_for
from tests.operations.hub.loopback_hub import TOKEN, LoopbackHub
from tests.operations.hub.test_upload import assert_no_token, assert_sent_once
from tests.training.runs import ADAMW, LLAMA, config

Env = dict[str, str]
PUSH = {"push_to_hub": True, "hub_model_id": "org/run"}


def args(save: Path, **keys: Any) -> NeoXArgs:
    return NeoXArgs.from_dict(config(LLAMA, ADAMW, save=str(save), checkpoint_factor=10, **{**PUSH, **keys}))


def start_run(folder: Path, environment: Env, **keys: Any) -> subprocess.Popen[str]:
    values = config(LLAMA, ADAMW, save=str(folder / "save"), **{**PUSH, **keys})
    (folder / "run.yml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "deepy.py", "train.py", str(folder / "run.yml")]
    return subprocess.Popen(command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, **PIPED_OUTPUT)


@pytest.mark.timeout(1800)  # 400 steps beside uploads; a loaded machine took more than the usual limit
@pytest.mark.product
@pytest.mark.parametrize("async_save", [False, True])
def test_steps_go_on_while_the_hub_hangs(hub: LoopbackHub, environment: Env, tmp_path: Path, async_save: bool) -> None:
    hub.fail(".* /", "late", times=10**6)
    keys = {"train_iters": 400, "checkpoint_factor": 100, "log_interval": 20, "async_save": async_save}
    run = start_run(tmp_path, environment, **keys, hub_strategy="all_checkpoints", ephemeral_save_interval=150)
    metrics, deadline = tmp_path / "save" / "logs" / "metrics.jsonl", time.monotonic() + 1500

    def steps() -> set[int]:
        return {row["iteration"] for row in read_metrics(metrics, Problems())} if metrics.exists() else set()

    while not (hub.waiting and 400 in steps()):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.1)
    assert not hub.repos, "nothing has been answered"
    hub.released.set()
    output, _ = run.communicate(timeout=1500)
    assert run.returncode == 0 and "push_to_hub: waiting up to 600 s for global_step" in output, output
    assert "not published yet" not in output
    for name in ("org/run", "org/neox-ckpt-run"):
        assert sorted(hub.repos[name].branches) == [*(f"global_step{n}00" for n in (1, 2, 3, 4)), "main"]
        assert hub.content(name, "main") == hub.content(name, "global_step400")
    assert_sent_once(hub)
    (tmp_path / "said").write_text(output)
    assert_no_token(tmp_path)


@pytest.mark.product
def test_a_run_is_not_concerned_by_a_hub_that_refuses(hub: LoopbackHub, environment: Env, tmp_path: Path) -> None:
    def output_of_run() -> str:
        run = start_run(tmp_path, environment, train_iters=2, checkpoint_factor=2, hub_strategy="end")
        output, _ = run.communicate(timeout=1500)
        assert run.returncode == 0, output
        return output

    hub.may_create = False
    refused = output_of_run()
    assert "run finished at iteration 2" in refused, refused
    (warning,) = [line for line in refused.splitlines() if "training continues. To publish it later, run: " in line]
    assert "global_step2: the upload ended with code 1: " in warning and "the token may not do this (403)" in warning
    hub.may_create = True
    assert "nothing left to do" in output_of_run()
    assert sorted(hub.repos["org/run"].branches) == ["global_step2", "main"], "the start that follows takes it up"
    command = warning.partition("publish it later, run: ")[2].replace("python ", f"{sys.executable} ", 1)
    done = subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=120, capture_output=True)
    assert b"has it already" in done.stdout


class Run:
    """Stands in for a run on rank 0, as far as the callback uses it."""

    def __init__(self, args: NeoXArgs) -> None:
        self.args, self.groups, self.lines = args, SimpleNamespace(world_rank=0), list[str]()
        self.logger = SimpleNamespace(info=self.lines.append, warning=self.lines.append)
        self.watchdog = SimpleNamespace(now=lambda activity: None, phase=lambda activity: nullcontext())
        self.stop, self.iteration = False, args.train_iters

    def stopping(self) -> bool:
        return self.stop


@pytest.fixture
def hanging_callback(
    hub: LoopbackHub, environment: Env, save: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A callback over five checkpoints, whose process has begun with the newest and hangs."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def make(**options: Any) -> tuple[PushToHub, Run, int]:
        hub.fail(".* /", "hang", times=10**6)
        run_args = args(save, train_iters=5)
        callback, run = PushToHub(run_args, "org/run", **options), Run(run_args)
        callback.on_train_start(run)
        wait_for(lambda: hub.waiting)
        return callback, run, callback._process.pid

    return make


@pytest.mark.more
@pytest.mark.parametrize("ending", ["bound", "signal", "error"])
def test_the_end_of_a_run_waits_no_longer_than_that(hanging_callback: Callable[..., Any], ending: str) -> None:
    callback, run, pid = hanging_callback(wait_s=1.0 if ending == "bound" else 3600.0)
    for _ in range(2000):
        callback.on_step_end(run, SimpleNamespace(iteration=6))
    callback.on_save(run, SimpleNamespace(iteration=7), True)
    run.stop = ending == "signal"
    if ending == "error":
        callback.on_error(run, RuntimeError())
    callback.close()
    steps = ", ".join(f"global_step{n}" for n in (5, 4, 3, 2, 1))
    assert run.lines[-1].startswith(f"push_to_hub: not published yet: {steps}")
    assert "--neox_checkpoint global_step5 global_step4" in run.lines[-1] and TOKEN not in "".join(run.lines)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)


def test_what_is_to_be_published(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By strategy, the newest first, and no checkpoint that stands only until the next."""
    started, finished_process = list[int](), SimpleNamespace(poll=lambda: 0, returncode=0)
    monkeypatch.setattr(PushToHub, "_start", lambda self, step: started.append(step) or finished_process)
    for strategy, saved in (("end", [5]), ("every_save", [5, 4, 3, 2, 1, 4, 5])):
        run_args = args(save, train_iters=5, hub_strategy=strategy)
        callback, run = PushToHub(run_args, "org/run"), Run(run_args)
        callback.on_train_start(run)
        for _ in range(9):
            callback.on_step_end(run, SimpleNamespace(iteration=3))
        callback.on_save(run, SimpleNamespace(iteration=3), True)
        for step in (4, 5):
            callback.on_save(run, SimpleNamespace(iteration=step), False)
        callback.close()
        assert started == saved and not run.lines[1:]
        started.clear()
    run_args = args(save, train_iters=9, hub_strategy="end")
    callback, run = PushToHub(run_args, "org/run"), Run(run_args)
    run.iteration = 5
    callback.on_train_start(run)
    callback.close()
    assert run.lines == [
        "push_to_hub: nothing was published: with hub_strategy end only the checkpoint of iteration 9 (train_iters) is "
        "published"
    ]


@pytest.mark.parametrize(("keys", "message"), [
    ({"save": None, "checkpoint_factor": None}, "push_to_hub: needs save"),
    ({"save": "s3://bucket/run"}, "push_to_hub: .*local folder.*s3://bucket/run"),
    ({"hub_model_id": "run"}, "hub_model_id: 'run' .*ORGANISATION/NAME"),
])  # fmt: skip
def test_keys_that_do_not_fit(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = config(LLAMA, ADAMW, **{"save": str(tmp_path), "checkpoint_factor": 1, **PUSH, **keys})
    with pytest.raises(ConfigError, match=message):
        NeoXArgs.from_dict(values).check_training()


def test_what_this_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as it is where it was imported first
    with pytest.raises(ConfigError, match="push_to_hub: HF_HUB_OFFLINE is set"):
        hub_repository(args(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert hub_repository(args(tmp_path)) == "org/run"
    with pytest.raises(ConfigError, match="hub_model_id: the repository: 'org/a--b': contains '--'"):
        hub_repository(args(tmp_path, hub_model_id="org/a--b"))
    for name in ("NEOX_HUB_ORG", "NEOX_SITE", "NEOX_HUB_NAMES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="push_to_hub: no organisation of the Hub is given.*or set hub_model_id"):
        hub_repository(args(tmp_path, hub_model_id=None))
    monkeypatch.setenv("NEOX_HUB_ORG", "site-org")
    monkeypatch.setenv("NEOX_HUB_PREFIX", "sfm")
    assert hub_repository(args(tmp_path / "lr=1", hub_model_id=None)) == "site-org/sfm-lr-1"
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="set HF_TOKEN"):
        hub_repository(args(tmp_path))
    monkeypatch.setattr("megatron.operations.hub.in_training.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="push_to_hub: .*huggingface_hub.*transformers.*pip install"):
        hub_repository(args(tmp_path))
