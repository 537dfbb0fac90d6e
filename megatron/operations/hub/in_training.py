"""Publishes checkpoints on the Hub while the run trains (`push_to_hub`): rank 0 starts a process per upload.

Training steps never wait for an upload. Each saved checkpoint joins a queue. One checkpoint at a time is
converted and uploaded, the newest first. The output of the uploads is in `<log_dir>/hub.log`.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.launch.environment import install_root
from megatron.neox_arguments import NeoXArgs
from megatron.operations.hub.checkpoints import steps_in
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.journal import is_finished
from megatron.operations.hub.names import checked_id, neox_repository
from megatron.operations.hub.submission import hub_variables, target_repository

LOG = "hub.log"
_COMMAND = "huggingface/upload_and_evaluate_checkpoint.py"
_WAIT_S = 600.0  # for running uploads at the end of the run
_STOP_S = 10.0  # from SIGTERM to SIGKILL of an upload process
_TELL_S = 60.0
# Removed from the environment of the upload process, because it is not a rank.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def hub_repository(args: NeoXArgs) -> str:
    """Returns the repository ORGANISATION/NAME to which a run with `push_to_hub` publishes.

    Raises ConfigError if packages, the token, HF_HUB_OFFLINE or the name rule out every upload.
    """
    missing = [name for name in ("huggingface_hub", "transformers") if find_spec(name) is None]
    if missing:
        raise args.error("push_to_hub", f"needs {' and '.join(missing)}; install: pip install 'neox[hf]'")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise args.error("push_to_hub", "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
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
    """Publishes the checkpoints of a run from rank 0. `hub_strategy` chooses checkpoints and formats.

    If an upload fails, training continues, and a warning gives the command that publishes the checkpoint
    later.
    """

    def __init__(self, args: NeoXArgs, repository: str, wait_s: float = _WAIT_S) -> None:
        """repository: result of `hub_repository`. wait_s: most seconds that `close` waits for unfinished
        uploads."""
        assert args.save_dir is not None
        self.save, self.repository, self.wait_s = Path(args.save_dir).absolute(), repository, wait_s
        self.only_last = args.hub_strategy == "end"
        self.formats = "both" if args.hub_strategy == "all_checkpoints" else "hf"
        self.log = Path(args.log_dir or self.save / "logs").absolute() / LOG
        self._waiting: list[int] = []  # the newest last
        self._step: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._run: TrainingRun | None = None  # set on rank 0
        self._other_run: TrainingRun | None = None  # set on all other ranks
        self._failed = False

    def on_train_start(self, run: TrainingRun) -> None:
        """Queues checkpoints that earlier starts of this run saved but did not publish."""
        if run.groups.world_rank == 0:
            self._run = run
            # While rank 0 waits for uploads, other ranks wait for rank 0, at most first_step_timeout_mins.
            self.wait_s = min(self.wait_s, 0.5 * 60.0 * run.args.first_step_limit_mins)
            self._waiting = [
                step for step in self._unpublished() if not self.only_last or step == run.args.train_iters
            ]  # fmt: skip
            self._go_on()
        else:
            self._other_run = run

    def on_completed_run(self, run: TrainingRun) -> None:
        """Does the same as `on_train_start`: a run without steps left may have an unpublished checkpoint."""
        self.on_train_start(run)

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Queues the saved checkpoint. With `async_save` its files may be incomplete; the upload waits for
        them."""
        if self._run is None or ephemeral or self.only_last and step.iteration != run.args.train_iters:
            return
        if step.iteration in self._waiting or step.iteration == self._step:
            return
        self._waiting.append(step.iteration)
        self._go_on()

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Starts the next queued upload if no upload is running."""
        if self._run is not None:
            self._go_on()

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Records that the run failed, so that `close` does not wait for uploads."""
        self._failed = True

    def close(self) -> None:
        """Waits up to `wait_s` seconds for uploads, unless the run failed or was told to stop.

        Then stops a running upload, and logs the command that publishes the checkpoints that are left.
        """
        run = self._run
        if self._other_run is not None and not self._failed:
            self._other_run.watchdog.now("waiting for uploads to the Hub")
        if run is None:
            return
        if not self._failed and not run.stopping():
            run.watchdog.now("waiting for uploads to the Hub")
            self._wait(run)
        left = self._left()
        self._end()
        if self.only_last and run.iteration < run.args.train_iters:
            run.logger.info(
                f"push_to_hub: nothing was published: with hub_strategy end only the checkpoint of iteration "
                f"{run.args.train_iters} (train_iters) is published"
            )
        if left:
            tags = ", ".join(f"global_step{step}" for step in left)
            run.logger.warning(f"push_to_hub: not published yet: {tags}; to publish them, run: {self.command(left)}")

    def command(self, steps: Sequence[int]) -> str:
        """Returns the shell command that publishes the run's checkpoints of these steps, for a person to
        run."""
        return f"cd {shlex.quote(str(install_root()))} && {shlex.join(['python', *self._words(steps)])}"

    def _words(self, steps: Sequence[int]) -> list[str]:
        words = [_COMMAND, "--experiment_name", str(self.save), "--repository", self.repository, "--neox_checkpoint"]
        words += [f"global_step{step}" for step in steps]
        return [*words, "--skip-eval", *(["--skip-neox-upload"] if self.formats == "hf" else [])]

    def _unpublished(self) -> list[int]:
        try:
            steps = steps_in(self.save) if self.save.is_dir() else ()
        except HubError:  # there is no checkpoint yet
            return []
        return [
            step for step in reversed(steps)
            if not is_finished(self.save, f"global_step{step}", self.repository, self.formats)
        ]  # fmt: skip

    def _left(self) -> list[int]:
        """Returns the steps of checkpoints that are queued or being uploaded, the newest first."""
        current = [self._step] if self._is_uploading() and self._step is not None else []
        return sorted({*self._waiting, *current}, reverse=True)

    def _go_on(self) -> None:
        if self._is_uploading() or not self._waiting:
            return
        self._step = self._waiting.pop()
        try:
            self._process = self._start(self._step)
        except OSError as problem:
            self._warn(f"the upload process cannot be started ({problem})")

    def _start(self, step: int) -> subprocess.Popen[bytes]:
        """Starts a process that uploads the checkpoint of `step`, and returns it.

        It runs in a new session, so signals to the run do not reach it. It sees no GPU and no rank variables.
        """
        python_path = filter(None, [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH")])
        env = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(python_path)}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-u", *self._words([step]), "--background"], cwd=install_root(), env=env,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _is_uploading(self) -> bool:
        """Returns whether an upload process is running. If it has failed since the last call, logs a
        warning."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            if code:
                self._warn(f"the upload ended with code {code}: {_last_line(self.log)}")
        return self._process is not None

    def _warn(self, reason: str) -> None:
        assert self._run is not None and self._step is not None
        text = f"push_to_hub: global_step{self._step}: {reason}; training continues. To publish it later, run: "
        self._run.logger.warning(text + self.command([self._step]))

    def _wait(self, run: TrainingRun) -> None:
        deadline, tell_at = time.monotonic() + self.wait_s, 0.0
        while True:
            self._go_on()
            unpublished, now = self._left(), time.monotonic()
            if not unpublished or now >= deadline or run.stopping():
                return
            if now >= tell_at:
                tags = ", ".join(f"global_step{step}" for step in unpublished)
                run.logger.info(
                    f"push_to_hub: waiting up to {deadline - now:.0f} s for {tags} to be published on "
                    f"{self.repository}; progress of the upload: {self.log}"
                )
                tell_at = now + _TELL_S
            time.sleep(0.2)

    def _end(self) -> None:
        """Stops the upload process if one is running. A later upload of the checkpoint continues from its
        journal."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_line(log: Path) -> str:
    """Returns the last line of the uploads' log, which says why an upload failed; else why there is no
    line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as problem:
        return f"{log} cannot be read ({problem.strerror})"
    return lines[-1] if lines else f"{log} is empty"
