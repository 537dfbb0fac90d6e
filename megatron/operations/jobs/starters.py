"""Starts a run for `tools/jobs.py submit` to watch: as a Slurm job, or with deepy.py on this machine."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron.launch.environment import LaunchError, install_root
from megatron.launch.site import sbatch_options
from megatron.operations.jobs.remedies import Attempt
from megatron.operations.jobs.scheduler import BATCH_FILE, Job, Slurm

_ENDS_S = 90.0  # seconds for a cancelled run to end: Slurm's KillWait, and what the batch file does meanwhile


class Starter(Protocol):
    """An interface to start a run, report its state and end it; for Slurm and for this machine."""

    def start(self, attempt: Attempt) -> str:
        """Starts the run with the changes of `attempt`; returns the number of its job or process."""
        ...

    def announce(self, number: str) -> str:
        """Returns the message to print after the run was started as job or process `number`."""
        ...

    def job(self, number: str) -> Job:
        """Returns the present state of the run that was started as job or process `number`."""
        ...

    def cancel(self, number: str) -> None:
        """Ends the run, and waits until it has ended. Raises LaunchError if it does not end in 90 s."""
        ...

    def line(self, attempt: Attempt) -> str:
        """Returns the command line that starts the run, for a person to copy."""
        ...


class SlurmStarter:
    """Starts runs as Slurm jobs: submits pretrain_neox.sbatch from the repository's folder."""

    def __init__(
        self, configs: Sequence[str], pairs: Sequence[str], nodes: int, options: Sequence[str],
        site: Mapping[str, str], slurm: Slurm,
    ) -> None:  # fmt: skip
        self._configs, self._pairs, self._nodes = configs, tuple(pairs), nodes
        self._options, self._site, self._slurm = tuple(options), site, slurm

    def start(self, attempt: Attempt) -> str:
        words, env = self._words(attempt), {**os.environ, **attempt.environment}
        if folder := self._site.get("NEOX_LOG_DIR"):
            (install_root() / folder).mkdir(parents=True, exist_ok=True)
        done = subprocess.run(words, cwd=install_root(), env=env, capture_output=True, text=True)
        if done.returncode:
            raise LaunchError(f"{shlex.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]

    def announce(self, number: str) -> str:
        return f"submitted job {number} for {self._nodes} node{'s' * (self._nodes > 1)}"

    def job(self, number: str) -> Job:
        job = self._slurm.job(number)
        if job is None:
            raise LaunchError(f"job {number}: Slurm no longer knows it, so its result is unknown; read the job's log")
        return job

    def cancel(self, number: str) -> None:
        if self.job(number).is_active:
            self._slurm.cancel([number])
        deadline = time.monotonic() + _ENDS_S
        while self.job(number).is_active:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"job {number} was cancelled, but is still running; to kill it: "
                    f"scancel --signal=KILL --full {number}"
                )
            time.sleep(1.0)

    def line(self, attempt: Attempt) -> str:
        return shlex.join(self._words(attempt))

    def _words(self, attempt: Attempt) -> list[str]:
        options = sbatch_options(self._nodes, self._site)
        options += [f"--exclude={','.join(attempt.exclude)}"] if attempt.exclude else []
        pairs = (*self._pairs, *attempt.pairs)
        return [
            "sbatch", "--parsable", *options, *self._options, BATCH_FILE, *self._configs,
            *(("--set", *pairs) if pairs else ()),
        ]  # fmt: skip


class LocalStarter:
    """Starts runs with deepy.py in the background, in a session of their own: they outlive this program."""

    def __init__(self, configs: Sequence[str], pairs: Sequence[str], site: Mapping[str, str], save: str | None) -> None:
        """configs, pairs: configuration files, and KEY=VALUE that override them. save: the run's `save`
        folder."""
        self._configs, self._pairs, self._save = configs, tuple(pairs), save
        self._folder = Path(site.get("NEOX_LOG_DIR", "logs")).absolute()
        self._processes: dict[str, tuple[subprocess.Popen[bytes], Path, float]] = {}

    def start(self, attempt: Attempt) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{Path(self._configs[0]).stem}-local-{time.strftime('%Y%m%d-%H%M%S')}"
        log = self._folder / f"{name}-{os.getpid()}.{len(self._processes)}.out"
        with log.open("xb") as file:
            process = subprocess.Popen(
                self._words(attempt), env={**os.environ, **attempt.environment}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, start_new_session=True,
            )  # fmt: skip
        self._processes[str(process.pid)] = (process, log, time.time())
        return str(process.pid)

    def announce(self, number: str) -> str:
        return f"started process {number}; to end it: {cancel_command(number, self._save)}"

    def job(self, number: str) -> Job:
        process, log, started = self._processes[number]
        code = process.poll()
        state = "RUNNING" if code is None else "FAILED" if code else "COMPLETED"
        return Job(
            number, "local", "", state, started, started, None, "" if code is None else f"{code}:0",
            work_dir=Path.cwd(), log=log, local=True,
        )  # fmt: skip

    def cancel(self, number: str) -> None:
        process = self._processes[number][0]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                raise LaunchError(
                    f"process {number} got SIGTERM, but is still running; to kill it: kill -KILL {number}"
                ) from None

    def line(self, attempt: Attempt) -> str:
        return shlex.join(self._words(attempt))

    def _words(self, attempt: Attempt) -> list[str]:
        pairs = (*self._pairs, *attempt.pairs)
        script = [sys.executable, "-u", str(install_root() / "deepy.py"), str(install_root() / "train.py")]
        return [*script, *self._configs, *(("--set", *pairs) if pairs else ())]


def cancel_command(number: str, save: str | Path | None) -> str:
    """Returns the shell command that ends a run of this machine.

    number: id of its process. save: the run's folder; None if it has no folder (yet)."""
    return f"python tools/jobs.py cancel {save}" if save is not None else f"kill {number}"
