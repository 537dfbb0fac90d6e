"""`push_to_hub`: checkpoints of a run are published beside it, by a process of its own on rank 0's machine.

A step never waits for it: saving notes a step in a list, and the process converts, sends and waits by itself,
one checkpoint at a time, the newest first. What it says is in `<log_dir>/hub.log`.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.launch.environment import install_root
from megatron.neox_arguments import NeoXArgs
from megatron.operations.hub.checkpoints import read_experiment
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.journal import is_finished
from megatron.operations.hub.names import checked_id, neox_repository
from megatron.operations.hub.submission import hub_variables, target_repository

LOG = "hub.log"
_COMMAND = "huggingface/upload_and_evaluate_checkpoint.py"
_WAIT_S = 600.0  # for what is under way when the run is over
_STOP_S = 10.0  # which a process has to end
_TELL_S = 60.0
# Of a rank, which this process is none of
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def hub_repository(args: NeoXArgs) -> str:
    """The repository of a run with `push_to_hub`; everything that can be wrong about it before the first step
    is (ConfigError)."""
    missing = [name for name in ("huggingface_hub", "tenacity", "transformers") if find_spec(name) is None]
    if missing:
        raise args.error("push_to_hub", f"needs {' and '.join(missing)}: pip install 'neox[hf]'")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise args.error("push_to_hub", "HF_HUB_OFFLINE is set, so that nothing can be sent; unset it")
    from megatron.operations.hub.upload import require_token

    assert args.save_dir is not None  # `validate_training`
    key = "hub_model_id" if args.hub_model_id is not None else "push_to_hub"
    try:
        require_token()
    except HubError as problem:
        raise args.error("push_to_hub", str(problem)) from None
    try:
        if args.hub_model_id is not None:
            repository = checked_id(args.hub_model_id, "the repository")
        else:
            repository = target_repository(Path(args.save_dir), None, hub_variables())
        if args.hub_strategy == "all_checkpoints":
            neox_repository(repository)
    except HubError as problem:
        raise args.error(key, f"{problem}; or set hub_model_id: ORGANISATION/NAME") from None
    return repository


class PushToHub(Callback):
    """Publishes the checkpoints of a run as `hub_strategy` says. Rank 0 alone does anything. That one cannot
    be published is a warning with the command that goes on; the run is not concerned."""

    def __init__(self, args: NeoXArgs, repository: str, wait_s: float = _WAIT_S) -> None:
        """repository: `hub_repository`. wait_s: seconds that the end of the run waits for uploads."""
        assert args.save_dir is not None
        self.save, self.repository, self.wait_s = Path(args.save_dir).absolute(), repository, wait_s
        self.only_last = args.hub_strategy == "end"
        self.formats = "both" if args.hub_strategy == "all_checkpoints" else "hf"
        self.log = Path(args.log_dir or self.save / "logs").absolute() / LOG
        self._waiting: list[int] = []  # the newest last
        self._step: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._run: TrainingRun | None = None  # on rank 0
        self._other: TrainingRun | None = None  # on others
        self._failed = False

    def on_train_start(self, run: TrainingRun) -> None:
        """Take up what an earlier start of this run has not published."""
        if run.groups.world_rank == 0:
            self._run = run
            # Other ranks wait for this one as long as they do for a first step.
            self.wait_s = min(self.wait_s, 0.5 * 60.0 * run.args.first_step_timeout_mins)
            self._waiting = [
                step for step in self._unpublished() if not self.only_last or step == run.args.train_iters
            ]  # fmt: skip
            self._go_on()
        else:
            self._other = run

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Note the step. With `async_save` its files are not there yet: the process waits for them."""
        if self._run is None or ephemeral or self.only_last and step.iteration != run.args.train_iters:
            return
        if step.iteration in self._waiting or step.iteration == self._step:
            return
        self._waiting.append(step.iteration)
        self._go_on()

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Begin with the next one when the one before has ended."""
        if self._run is not None:
            self._go_on()

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Nothing is waited for."""
        self._failed = True

    def close(self) -> None:
        """Wait for what is not published yet, if the run was not told to stop, and say how to go on with what
        then is not."""
        run = self._run
        if self._other is not None and not self._failed:
            self._other.watchdog.now("waiting for uploads to the Hub")
        if run is None:
            return
        if not self._failed and not run.stopping():
            run.watchdog.now("waiting for uploads to the Hub")
            self._wait(run)
        left = self._left()
        self._end()
        if self.only_last and run.iteration < run.args.train_iters:
            run.logger.info(
                f"push_to_hub: nothing was published: hub_strategy end waits for iteration {run.args.train_iters}"
            )
        if left:
            tags = ", ".join(f"global_step{step}" for step in left)
            run.logger.warning(f"push_to_hub: not published yet: {tags}; this goes on: {self.command(left)}")

    def command(self, steps: Sequence[int]) -> str:
        """What a person types to publish checkpoints of this run."""
        return f"cd {shlex.quote(str(install_root()))} && {shlex.join(['python', *self._words(steps)])}"

    def _words(self, steps: Sequence[int]) -> list[str]:
        words = [_COMMAND, "--experiment_name", str(self.save), "--repository", self.repository, "--neox_checkpoint"]
        words += [f"global_step{step}" for step in steps]
        return [*words, "--skip-eval", *(["--skip-neox-upload"] if self.formats == "hf" else [])]

    def _unpublished(self) -> list[int]:
        try:
            steps = read_experiment(self.save).steps if self.save.is_dir() else ()
        except HubError:  # there is no checkpoint yet
            return []
        return [
            step for step in reversed(steps)
            if not is_finished(self.save, f"global_step{step}", self.repository, self.formats)
        ]  # fmt: skip

    def _left(self) -> list[int]:
        """Steps that are waiting or under way, the newest first."""
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process.returncode)
        current = [self._step] if self._process is not None and self._step is not None else []
        return sorted({*self._waiting, *current}, reverse=True)

    def _go_on(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._ended(self._process.returncode)
        if not self._waiting:
            return
        self._step = self._waiting.pop()
        try:
            self._process = self._start(self._step)
        except OSError as problem:
            self._warn(f"cannot be started ({problem})")

    def _start(self, step: int) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return self._popen([sys.executable, "-u", *self._words([step]), "--background"], log)

    def _popen(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """A session of its own, which a signal to the run's does not reach; without GPUs and this rank's
        variables."""
        env = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _with_root(os.environ)}
        return subprocess.Popen(
            command, cwd=install_root(), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip

    def _ended(self, code: int) -> None:
        self._process = None
        if code:
            self._warn(f"ended with code {code}: {_last_line(self.log)}")

    def _warn(self, reason: str) -> None:
        assert self._run is not None and self._step is not None
        text = f"push_to_hub: global_step{self._step}: {reason}; the run goes on, and this later: "
        self._run.logger.warning(text + self.command([self._step]))

    def _wait(self, run: TrainingRun) -> None:
        until, tell_at = time.monotonic() + self.wait_s, 0.0
        while True:
            self._go_on()
            left, now = self._left(), time.monotonic()
            if not left or now >= until or run.stopping():
                return
            if now >= tell_at:
                tags = ", ".join(f"global_step{step}" for step in left)
                run.logger.info(
                    f"push_to_hub: waiting up to {until - now:.0f} s for {tags} to be published on "
                    f"{self.repository}; {self.log} says how far it is"
                )
                tell_at = now + _TELL_S
            time.sleep(0.2)

    def _end(self) -> None:
        """End the process that is under way; its journal keeps what it has done."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _with_root(env: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[3]), env.get("PYTHONPATH")]))


def _last_line(log: Path) -> str:
    """The reason that a process gave at last."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as problem:
        return f"{log} cannot be read ({problem.strerror})"
    return lines[-1] if lines else f"{log} is empty"
