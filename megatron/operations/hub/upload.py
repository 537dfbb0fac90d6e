"""Publishes one checkpoint: converts it, sends it to the revision `global_step<N>`, and evaluates it on
request.

The last checkpoint of a run is also sent to the revision main. Every part first checks the Hub and the
journal for work already done, so an interrupted upload can simply be started again.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron.launch.environment import install_root
from megatron.launch.typed_variables import CLUSTER_VARIABLES
from megatron.neox_arguments import UserError
from megatron.operations.hub.card import CARD
from megatron.operations.hub.checkpoints import identity
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.journal import FOLDER, Journal, open_journal
from megatron.operations.hub.names import neox_repository
from megatron.operations.hub.repository import MAIN, LocalFile, Repository, folder_files
from megatron.operations.hub.retrying import Patience, Say, hide_token
from megatron.process.score_files import RESULT_FILES, score_rows

Formats = Literal["both", "hf", "neox"]


@dataclass(frozen=True)
class Upload:
    """A checkpoint to publish.

    save: the folder that holds the checkpoint global_step<step>.
    repository: ORGANISATION/NAME of the model on the Hub.
    is_last: `step` is the run's `train_iters`; then the checkpoint is also published as revision main.
    scratch: folder for the converted model until it is sent; None: `<save>/hub`.
    keep_converted: do not delete the converted model afterwards.
    tasks: lm-eval tasks to evaluate after the upload; (): none. include: folders of the user's tasks.
    eval_limit: number of documents of each task, for a trial; None: all.
    tokenizer: published instead of the checkpoint's tokenizer: a folder, a file or a Hub name.
    wandb_project, wandb_entity: Weights & Biases project and its owner, to which scores are logged.
    force_eval: evaluate even if scores of `tasks` are known.
    """

    save: Path
    step: int
    repository: str
    is_last: bool
    formats: Formats = "both"
    scratch: Path | None = None
    keep_converted: bool = False
    patience: Patience = field(default_factory=Patience)
    tasks: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    eval_limit: float | None = None
    tokenizer: str | None = None
    wandb_project: str | None = None
    wandb_entity: str | None = None
    force_eval: bool = False

    @property
    def tag(self) -> str:
        """The name of the checkpoint's folder and of its revision on the Hub: `global_step<N>`."""
        return f"global_step{self.step}"

    @property
    def tracking(self) -> dict[str, Any]:
        """Configuration keys with which eval.py logs scores to Weights & Biases; {} without project and
        entity."""
        all_keys = {"wandb_project": self.wandb_project, "wandb_team": self.wandb_entity}
        keys = {key: value for key, value in all_keys.items() if value}
        return {"use_wandb": True, "wandb_run_name": f"{self.save.name}_{self.tag}", **keys} if keys else {}

    @property
    def revisions(self) -> tuple[str, ...]:
        """The revisions to update. main is first, because a branch created after it starts with its files."""
        return (MAIN, self.tag) if self.is_last else (self.tag,)


def publish_checkpoint(upload: Upload, say: Say, patience_s: float = 0.0) -> bool:
    """Publishes a checkpoint on the Hub. Returns False if it does not exist, or the run removed it meanwhile.

    patience_s: seconds to wait for a checkpoint that the run may still be writing.

    Raises HubError, CheckpointError. A repeated call continues an interrupted upload.
    """
    require_token()
    checkpoint = upload.save / upload.tag
    if not _wait_for(checkpoint, patience_s, say):
        say(f"{upload.tag}: skipped: {checkpoint} does not exist (keep_last_n_checkpoints may have removed it)")
        return False
    with open_journal(upload.save, upload.tag, say) as journal:
        try:
            _publish(upload, checkpoint, journal, say)
        except (UserError, OSError):
            if checkpoint.is_dir():
                raise
            journal.add("gone")
            say(f"{upload.tag}: skipped: the run removed it during the upload (keep_last_n_checkpoints)")
            return False
    return True


def require_token() -> None:
    """Raises HubError unless huggingface_hub finds a token, from HF_TOKEN or `hf auth login`."""
    try:
        from huggingface_hub import get_token
    except ModuleNotFoundError:
        raise HubError("huggingface_hub is not installed; install: pip install 'neox[hf]'") from None
    if not get_token():
        raise HubError("no token for the Hub: set HF_TOKEN in .env, which jobs read, or run `hf auth login`")


def _publish(upload: Upload, checkpoint: Path, journal: Journal, say: Say) -> None:
    source = identity(checkpoint) + (f", tokenizer {upload.tokenizer}" if upload.tokenizer else "")
    if upload.formats != "neox":
        _publish_hf(upload, checkpoint, source, journal, say)
    if upload.formats != "hf":
        from megatron.operations.hub.conversion import neox_files

        name = neox_repository(upload.repository)
        repository = Repository(name, upload.patience, say)
        repository.prepare()
        _send(repository, upload, neox_files(checkpoint, name, upload.repository), journal, say)
    journal.add("finished", repository=upload.repository, formats=upload.formats)


def _publish_hf(upload: Upload, checkpoint: Path, source: str, journal: Journal, say: Say) -> None:
    repository = Repository(upload.repository, upload.patience, say)
    repository.prepare()
    folder = (upload.scratch or upload.save / FOLDER) / upload.tag
    converted_digests = journal.digests(source)
    has_scores = not upload.tasks or (_scores(journal, upload, source) is not None and not upload.force_eval)
    if upload.tasks and has_scores and upload.tracking:
        say(
            f"{upload.tag}: its scores are known, so it is not evaluated and nothing is logged to W&B; to do both "
            "again, add --force-eval-if-exists"
        )
    lacks = partial(repository.lacks, files=converted_digests or {})
    if converted_digests is not None and has_scores and not any(map(lacks, upload.revisions)):
        say(f"{upload.tag}: nothing to do: {repository.name} has it already")
    else:
        files = _converted(upload, checkpoint, folder, source, journal, say)
        _send(repository, upload, files, journal, say)
        if not has_scores:
            _evaluate(upload, checkpoint, folder, source, journal, say)
            _send(repository, upload, folder_files(folder), journal, say)
    if not upload.keep_converted and folder.exists():
        shutil.rmtree(folder)


def _converted(
    upload: Upload, checkpoint: Path, folder: Path, source: str, journal: Journal, say: Say
) -> dict[str, LocalFile]:
    """Returns the files of the converted checkpoint in `folder`; converts it if they are missing or
    changed."""
    converted_digests = journal.digests(source)
    if converted_digests is not None and folder.is_dir():
        files = folder_files(folder)
        if {name: file.digest for name, file in files.items()} == converted_digests:
            say(f"{upload.tag}: was converted before; using {folder}")
            return files
    from megatron.operations.hub.conversion import convert, rewrite_card

    say(f"{upload.tag}: converting to HuggingFace's format in {folder}")
    start_time = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    convert(checkpoint, folder, upload.tokenizer)
    scores = _scores(journal, upload, source)
    if scores:
        rewrite_card(checkpoint, folder, scores)
    files = folder_files(folder)
    _note(journal, source, files)
    say(f"{upload.tag}: converted in {time.monotonic() - start_time:.1f} s")
    return files


def _note(journal: Journal, source: str, files: Mapping[str, LocalFile]) -> None:
    records = {name: vars(file.digest) for name, file in files.items()}
    journal.add("converted", source=source, files=records)


def _send(repository: Repository, upload: Upload, files: Mapping[str, LocalFile], journal: Journal, say: Say) -> None:
    for revision in upload.revisions:
        place = {"repository": repository.name, "revision": revision}
        sent = partial(journal.add, "sent", **place)
        commit = repository.publish(revision, files, f"{upload.tag} of {upload.save.name}", sent)
        if commit is None:
            say(f"{upload.tag}: {repository.name}@{revision} has it already")
        else:
            say(f"{upload.tag}: published {repository.name}@{revision}")
        if commit is not None or journal.last("published", **place) is None:
            journal.add("published", commit=commit, **place)


def _scores(journal: Journal, upload: Upload, source: str) -> dict[str, float] | None:
    """Returns scores of the checkpoint for `upload.tasks` from the journal; None if there are none.

    Without tasks it returns the scores of the last evaluation. source: identifies the checkpoint's
    content."""
    task_facts = {"tasks": list(upload.tasks)} if upload.tasks else {}
    line = journal.last("scores", source=source, **task_facts)
    return None if line is None else line["values"]


def _evaluate(upload: Upload, checkpoint: Path, folder: Path, source: str, journal: Journal, say: Say) -> None:
    """Evaluates the converted model in `folder`, and writes the scores into the journal and the model
    card."""
    from megatron.operations.hub.conversion import rewrite_card

    scores = evaluate_folder(folder, upload, say)
    journal.add("scores", source=source, tasks=list(upload.tasks), values=scores)
    rewrite_card(checkpoint, folder, scores)
    say(f"{upload.tag}: scores were added to {CARD}")
    _note(journal, source, folder_files(folder))


def evaluate_folder(folder: Path, upload: Upload, say: Say) -> dict[str, float]:
    """Evaluates a converted model with eval.py in a subprocess, and returns scores by name (TASK_METRIC).

    Raises HubError with the last lines of eval.py's output if it fails."""
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "eval.py", "--hf-model", str(folder), "--eval_tasks", *upload.tasks]
        command += ["--eval_include_path", *upload.include] if upload.include else []
        command += ["--eval_limit", f"{upload.eval_limit:g}"] if upload.eval_limit is not None else []
        command += ["--eval_output_dir", results]
        keys = [f"{key}={json.dumps(value)}" for key, value in upload.tracking.items()]
        command += ["--set", *keys] if keys else []
        say(f"{folder.name}: evaluating {' '.join(upload.tasks)}")
        child_env = {name: value for name, value in os.environ.items() if name not in CLUSTER_VARIABLES}
        done = subprocess.run(
            command, cwd=install_root(), env=child_env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
        files = list(Path(results).glob(RESULT_FILES))
        if done.returncode or not files:
            lines = hide_token(done.stdout).strip().splitlines()[-3:]
            raise HubError(
                f"{folder.name}: eval.py failed (exit code {done.returncode}); its last lines: {' / '.join(lines)}"
            )
        say(hide_token(done.stdout).rstrip())
        return read_scores(files[0])


def read_scores(file: Path) -> dict[str, float]:
    """Returns the scores in a result file of lm-eval, without standard errors.

    Names are TASK_METRIC, or TASK_METRIC_FILTER for results of a filter other than "none"."""
    return {row.name: row.value for row in score_rows(json.loads(file.read_text(encoding="utf-8")))}


def _wait_for(checkpoint: Path, patience_s: float, say: Say) -> bool:
    """Waits up to `patience_s` seconds until the folder of a checkpoint exists, and returns whether it does.

    The folder appears under this name only when it is complete."""
    deadline, announced = time.monotonic() + patience_s, False
    while not checkpoint.is_dir():
        if time.monotonic() >= deadline:
            return False
        if not announced:
            say(f"{checkpoint.name}: waiting until the run has written it")
            announced = True
        time.sleep(0.2)
    return True
