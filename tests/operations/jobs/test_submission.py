"""The outcome of a submitted run, with a starter whose jobs end as they are told to."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megatron.launch.environment import LaunchError
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.operations.jobs import submission
from megatron.operations.jobs.remedies import Attempt
from megatron.operations.jobs.scheduler import Job, Slurm
from megatron.operations.jobs.starters import SlurmStarter
from megatron.operations.jobs.submission import Request, start_and_watch, submit
from tests.launch.runs import write_program
from tests.operations.jobs.test_joblog import LINE
from tests.training.runs import BASE

PORT_IN_USE = "deepy.py: error: MASTER_PORT in the environment: port 29500 cannot be used (Address already in use)\n"
GOOD = "".join(LINE.format(n) for n in range(1, 8))


class ScriptedStarter:
    """A starter whose jobs write these logs; each goes on with a line at every look, or has failed."""

    def __init__(self, folder: Path, logs: Sequence[str], interrupt: bool = False) -> None:
        self._folder, self._logs, self._interrupt, self._looks = folder, list(logs), interrupt, 0
        self.attempts, self.cancelled = list[Attempt](), list[str]()

    def start(self, attempt: Attempt) -> str:
        self.attempts.append(attempt)
        number = str(len(self.attempts))
        self._log(number).write_text(self._logs[len(self.attempts) - 1])
        return number

    def announce(self, number: str) -> str:
        return f"told job {number}"

    def job(self, number: str) -> Job:
        text = self._log(number).read_text()
        if self._interrupt and self._looks == 1:
            self._looks = 2
            raise KeyboardInterrupt
        self._looks += 1
        if "lm_loss" in text:
            with self._log(number).open("a") as file:
                file.write(LINE.format(7 + self._looks))
        state = "FAILED" if "error:" in text else "RUNNING"
        return Job(number, "neox-training", "me", state, exit_code="1:0", log=self._log(number))

    def cancel(self, number: str) -> None:
        self.cancelled.append(number)

    def line(self, attempt: Attempt) -> str:
        return f"sbatch {' '.join(f'{name}={value}' for name, value in attempt.environment.items())}".strip()

    def _log(self, number: str) -> Path:
        return self._folder / f"{number}.out"


class Fate:
    def __init__(self, starter: ScriptedStarter, folder: Path, retries: int = 2, watch: int = 20) -> None:
        self.out, self.err = list[str](), list[str]()
        args = NeoXArgs.from_dict({**BASE, "save": str(folder / "save"), "checkpoint_factor": 10, "train_iters": 200})
        request = Request(("/p/a.yml",), retries=retries, watch=watch, interval_s=0.001)
        no_slurm = Slurm({}, self.err.append, {"PATH": ""})
        self.code = start_and_watch(starter, request, args, no_slurm, {}, self.out.append, self.err.append)


def test_success_only_after_the_iterations(tmp_path: Path) -> None:
    starter = ScriptedStarter(tmp_path, [GOOD])
    fate = Fate(starter, tmp_path)
    assert fate.code == 0 and len(starter.attempts) == 1 and not starter.cancelled
    (line,) = fate.out
    assert line.startswith("1: success: iteration 20/200: loss 6.1249, share of peak unknown") and "to go; log" in line


def test_two_retries_and_no_more(tmp_path: Path) -> None:
    starter = ScriptedStarter(tmp_path, [PORT_IN_USE] * 3)
    fate = Fate(starter, tmp_path)
    assert fate.code == 4 and not fate.out and len(starter.attempts) == 3
    assert [attempt.environment.get("MASTER_PORT") for attempt in starter.attempts] == [None, "30501", "30502"]
    report = (tmp_path / "3.report.txt").read_text()
    assert report.startswith("run of /p/a.yml: port in use\n") and report.count("port in use: submitted again") == 2
    assert "command  sbatch MASTER_PORT=30502" in report and report in fate.err


@pytest.mark.parametrize(("retries", "starts"), [(0, 1), (1, 2), (2, 2)])
def test_a_retry_that_helps(tmp_path: Path, retries: int, starts: int) -> None:
    starter = ScriptedStarter(tmp_path, [PORT_IN_USE, GOOD])
    assert (Fate(starter, tmp_path, retries).code, len(starter.attempts)) == (0 if retries else 4, starts)


@pytest.mark.parametrize("line", ["torch.OutOfMemoryError: out of memory",
                                  "train.py: error: step 3: loss is not finite"])  # fmt: skip
def test_what_is_not_safe_is_not_tried_again(tmp_path: Path, line: str) -> None:
    starter = ScriptedStarter(tmp_path, [f"{line}\nerror: failed\n"])
    assert Fate(starter, tmp_path).code == 4 and len(starter.attempts) == 1
    assert "nothing: submitting again cannot repair this failure" in (tmp_path / "1.report.txt").read_text()


def test_ctrl_c_ends_the_waiting_and_not_the_run(tmp_path: Path) -> None:
    starter = ScriptedStarter(tmp_path, [GOOD], interrupt=True)
    fate = Fate(starter, tmp_path, watch=100)
    assert fate.code == 130 and not starter.cancelled and not fate.out
    assert fate.err[-1] == f"1 continues, but is no longer watched; its log: {tmp_path}/1.out"


def test_what_looks_like_a_crash_may_be_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job is given time; then it is one for a person, who is told how to end it."""
    monkeypatch.setattr(submission, "_PATIENCE_S", 0.05)
    starter = ScriptedStarter(tmp_path, ["ExceptionGroup is deprecated\n"])
    assert Fate(starter, tmp_path).code == 4 and not starter.cancelled
    assert "it is still running; to end it: python tools/jobs.py cancel 1" in (tmp_path / "1.report.txt").read_text()


def test_bad_requests_start_nothing(tmp_path: Path) -> None:
    def submit_request(**keys: object) -> None:
        no_slurm = Slurm({}, lambda text: None, {"PATH": ""})
        request = Request(**{"configs": (str(config),), **keys})  # type: ignore[arg-type]
        submit(request, no_slurm, {}, pytest.fail, pytest.fail)

    config = tmp_path / "a.yml"
    config.write_text("train_iters: 3\n" + "lr_decay_stile: cosine\n")
    with pytest.raises(ConfigError, match="a.yml:2: lr_decay_stile"):
        submit_request()
    pairs = tuple(f"{name}={value}" for name, value in BASE.items() if not isinstance(value, dict))
    config.write_text("optimizer: {type: Adam, params: {lr: 0.001}}\n")
    with pytest.raises(LaunchError, match="has no Slurm .* add --local"):
        submit_request(pairs=pairs)
    with pytest.raises(LaunchError, match="--local starts the run on this machine alone"):
        submit_request(pairs=pairs, local=True, nodes=2)


@pytest.mark.parametrize(("finetune", "nodes", "count"), [(False, None, 64), (True, None, 16), (True, 3, 3)])
def test_the_sites_number_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finetune: bool, nodes: int | None,
                                   count: int) -> None:  # fmt: skip
    """Slurm's refusal is one line, with the command."""
    problem = "sbatch: error: invalid partition specified"
    for name in ("scontrol", "sbatch"):
        write_program(tmp_path / name, f"#!/bin/sh\necho '{problem}' >&2; exit 1\n")
    path = tmp_path / "a.yml"
    path.write_text(yaml.safe_dump({**BASE, "save": "a", "load": "b", "checkpoint_factor": 9, "finetune": finetune}))
    site = {"NEOX_NODES_PRETRAIN": "64", "NEOX_NODES": "16"}
    monkeypatch.setenv("PATH", str(tmp_path), os.pathsep)
    site_slurm = Slurm(site, pytest.fail)
    with pytest.raises(LaunchError) as refused:
        submit(Request((str(path),), nodes=nodes), site_slurm, site, pytest.fail, pytest.fail)
    assert str(refused.value) == f"sbatch --parsable --nodes={count} pretrain_neox.sbatch {path}: {problem}"


def test_the_sites_words_are_in_the_line(tmp_path: Path) -> None:
    site = {"NEOX_GPUS_PER_NODE": "4", "NEOX_LOG_DIR": "/p/logs"}
    starter = SlurmStarter(["/p/a.yml"], ["a=b c"], 16, ["--time=1"], site, Slurm(site, lambda text: None))
    assert starter.line(Attempt(("master_port=1",), exclude=("n1", "n2"))) == (
        "sbatch --parsable --nodes=16 --gres=gpu:4 --output=/p/logs/%x-%j.out --exclude=n1,n2 --time=1 "
        "pretrain_neox.sbatch /p/a.yml --set 'a=b c' master_port=1"
    )
    assert starter.announce("7") == "submitted job 7 for 16 nodes"
