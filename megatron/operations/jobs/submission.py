"""Submits a run and watches its first iterations. Retries failures that are safe to retry; reports others to
a person in a text of one page."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.launch.environment import LaunchError, install_root
from megatron.launch.gpus import gpu_named
from megatron.launch.site import site_nodes, starts_from_a_model
from megatron.neox_arguments.values.integers import parse_integer
from megatron.operations.jobs.failures import UNKNOWN, Failure, classify
from megatron.operations.jobs.joblog import last_lines
from megatron.operations.jobs.overview import Row, row_of
from megatron.operations.jobs.remedies import Attempt, remedy
from megatron.operations.jobs.scheduler import Slurm
from megatron.operations.jobs.starters import LocalStarter, SlurmStarter, Starter, cancel_command
from megatron.operations.jobs.table import duration
from megatron.operations.jobs.verdict import STALE

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

FOR_A_PERSON, INTERRUPTED = 4, 130  # exit codes
_EVIDENCE = 400  # lines at the end of a log that are searched for the failure
_PATIENCE_S = 60.0  # seconds that a running job may look crashed: a library may only have printed a warning
_SAY_EVERY_S = 30.0
_LAST = 25  # lines at the end of a log that are shown if no line explains the failure
_WIDTH = 200  # characters of a line in the report


@dataclass(frozen=True)
class Request:
    """A run to submit, and how to watch it.

    configs: configuration files.
    pairs: KEY=VALUE that override them.
    nodes: number of nodes; None for the site's number.
    watch: number of iterations to wait for.
    local: start the run on this machine, without a scheduler.
    retries: largest number of submissions after the first.
    interval_s: seconds between two looks at the job.
    """

    configs: tuple[str, ...]
    pairs: tuple[str, ...] = ()
    nodes: int | None = None
    watch: int = 50
    local: bool = False
    retries: int = 2
    sbatch_options: tuple[str, ...] = ()
    interval_s: float = 5.0


def submit(
    request: Request, slurm: Slurm, site: Mapping[str, str], succeed: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """Submits a run, and waits until it has trained its first iterations. Returns the exit code.

    The code is 0 on success; FOR_A_PERSON (4), with a report, if a person has to look; INTERRUPTED (130)
    after Ctrl-C. succeed: called with the line of success. say: called with every other message.

    Raises ConfigError for an invalid configuration, and LaunchError if the run cannot be submitted.
    """
    args, configs = _resolve(request)
    return start_and_watch(_starter(request, args, configs, slurm, site), request, args, slurm, site, succeed, say)


def start_and_watch(
    starter: Starter, request: Request, args: "NeoXArgs", slurm: Slurm, site: Mapping[str, str],
    succeed: Callable[[str], None], say: Callable[[str], None],
) -> int:  # fmt: skip
    """Starts a run, watches its first iterations, and retries failures that are safe to retry.

    Returns 0 on success, FOR_A_PERSON (4) if a person has to look, or INTERRUPTED (130) after Ctrl-C, which
    ends the watching but not the run. args: the run's checked configuration."""
    attempt, remedies_tried = Attempt(), list[str]()
    while True:
        base = _start_iteration(args)
        number = starter.start(attempt)
        say(starter.announce(number))
        try:
            row, crashed = _watch(starter, number, base, request, args, site, say)
        except KeyboardInterrupt:
            say(f"{number} continues, but is no longer watched; its log: {starter.job(number).log}")
            return INTERRUPTED
        if not crashed:
            succeed(_success(row, args, base))
            return 0
        lines = last_lines(row.job.log, _EVIDENCE) if row.job.log is not None and row.job.log.is_file() else []
        failure = classify(row.job, lines)
        say(f"{number}: {failure.kind.name}: {failure.lines[-1] if failure.lines else row.verdict.detail}")
        applied = None
        if failure.kind.safe and len(remedies_tried) < request.retries:
            starter.cancel(number)  # it may hang instead of having ended
            applied = remedy(failure, row, args, attempt.exclude, lines, slurm)
            say(applied.action)
            remedies_tried.append(f"{number}: {failure.kind.name}: {applied.action}")
        if applied is None or not applied.helps:
            path, text = write_report(request, row, failure, remedies_tried, starter.line(attempt), lines)
            say(f"a person has to look; report: {path}")
            say(text)
            return FOR_A_PERSON
        attempt = attempt.with_remedy(applied)


def _resolve(request: Request) -> tuple["NeoXArgs", list[str]]:
    """Returns (the checked configuration of the requested run, absolute paths of its files).

    Raises ConfigError for mistakes in it or a missing file, LaunchError for the name of a preset."""
    from megatron.neox_arguments.reading.command_line import parse_deepy

    words = [*request.configs, *(("--set", *request.pairs) if request.pairs else ())]
    args = parse_deepy([str(install_root() / "train.py"), *words], preset_root=install_root()).args.check_training()
    missing = [config for config in request.configs if not Path(config).is_file()]
    if missing:
        raise LaunchError(f"{missing[0]}: no such file; give paths of configuration files, not names of presets")
    return args, [os.path.abspath(config) for config in request.configs]


def _starter(
    request: Request, args: "NeoXArgs", configs: Sequence[str], slurm: Slurm, site: Mapping[str, str]
) -> Starter:
    if request.local:
        if request.sbatch_options or request.nodes not in (None, 1):
            raise LaunchError(
                "--local starts the run on this machine alone; remove --nodes and the sbatch options after --"
            )
        return LocalStarter(configs, request.pairs, site, args.save_dir)
    if not slurm.is_here:
        raise LaunchError(
            "this machine has no Slurm (scontrol): submit on a login node, or add --local to run deepy.py here"
        )
    nodes = request.nodes or site_nodes(starts_from_a_model(args), configs, site)[0] or 1
    return SlurmStarter(configs, request.pairs, nodes, request.sbatch_options, site, slurm)


def _start_iteration(args: "NeoXArgs") -> int:
    """Returns the iteration from which the run will resume, from the file `latest` in `save`; 0 for a new
    run."""
    try:
        text = (Path(args.save_dir or "") / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    number = parse_integer(text.removeprefix("global_step")) or 0
    return number if not args.restart and args.load == args.save else 0


def _watch(
    starter: Starter, number: str, base: int, request: Request, args: "NeoXArgs", site: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[Row, bool]:  # fmt: skip
    """Waits until a started run has trained `request.watch` iterations, has ended, or needs a person.

    number: number of its job or process. base: the iteration from which it starts. Returns (its row in the
    table of jobs, whether it failed).
    """
    last_text, last_time, suspected = "", 0.0, None
    while True:
        job = starter.job(number)
        row = row_of(job, site)
        done, verdict = row.progress, row.verdict
        reached = done is not None and done.iteration >= _target(base, done.total, request.watch, done.iteration)
        if reached and not row.needs_a_person:
            return row, False
        if not job.is_active:
            return row, not (verdict.kind == "FINISHED" and _is_done(row, args))
        now = time.monotonic()
        if row.needs_a_person:
            suspected = suspected or now
            if verdict.kind == STALE or now - suspected >= _PATIENCE_S:
                return row, True
        else:
            suspected = None
        text = _progress_line(row)
        if text != last_text and (now - last_time >= _SAY_EVERY_S or str(verdict) not in last_text):
            say(f"{number}: {text}")
            last_text, last_time = text, now
        time.sleep(request.interval_s)


def _target(base: int, total: int, watch: int, iteration: int) -> int:
    """Returns the iteration to wait for: `watch` iterations after the start, at most `total`.

    base: the iteration expected at the start. If `iteration` is not beyond it, the run is taken to start at
    0."""
    return min(total, (base if iteration > base else 0) + watch)


def _is_done(row: Row, args: "NeoXArgs") -> bool:
    """Returns whether an ended job has reached `train_iters`, or its log says that nothing was left to
    train."""
    if row.progress is not None:
        return row.progress.iteration >= row.progress.total
    lines = last_lines(row.job.log, 20) if row.job.log is not None and row.job.log.is_file() else []
    return any("nothing left to do: train_iters is" in line for line in lines)


def _progress_line(row: Row) -> str:
    parts = [str(row.verdict)]
    if row.verdict.detail:
        parts[0] += f" ({row.verdict.detail})"
    if row.progress is not None:
        parts.append(f"iteration {row.progress.iteration}/{row.progress.total}, loss {row.progress.loss:.4g}")
    return ", ".join(parts)


def _success(row: Row, args: "NeoXArgs", base: int) -> str:
    done = row.progress
    if done is None:
        return f"{row.job.id}: nothing left to do: train_iters is {args.train_iters}"
    parts = [f"loss {done.loss:.4f}"]
    parts += [f"{row.tokens_per_s:,.0f} tokens/s"] if row.tokens_per_s is not None else []
    parts += [share_of_peak(row)]
    parts += [f"{duration(row.eta_s)} to go"] if row.eta_s is not None else []
    return f"{row.job.id}: success: iteration {done.iteration}/{done.total}: {', '.join(parts)}; log {row.job.log}"


def share_of_peak(row: Row) -> str:
    """Returns a text such as `41.2% of peak (...)`: the model's FLOP/s as a share of the device's peak.

    If the share is unknown, the text says which key to set."""
    if row.utilization is not None:
        return f"{row.utilization:.1%} of peak (peak_theoretical_tflops)"
    name = row.device or ""
    gpu = gpu_named(name)
    if gpu is None or row.model_flops is None:
        return "share of peak unknown: set peak_theoretical_tflops"
    return f"{row.model_flops / (gpu.bf16 * 1e12):.1%} of peak ({gpu.bf16:g} dense bf16 TFLOP/s of {name})"


def write_report(
    request: Request, row: Row, failure: Failure, remedies_tried: Sequence[str], command: str, lines: Sequence[str]
) -> tuple[Path, str]:
    """Writes a one-page report of a failed run beside its log, or in the current folder if that fails.

    remedies_tried: a line for each remedy. command: the command line of the last submission. lines: end of
    the log. Returns (path of the report, its text)."""
    job, verdict = row.job, row.verdict
    parts = [
        f"run of {' '.join(request.configs)}: {failure.kind.name}",
        "",
        f"job      {job.id} ({job.name}), {job.state}"
        + (f", exit code {job.exit_code}" if job.exit_code else "")
        + (f", on {job.node_list}" if job.node_list else ""),
        f"verdict  {verdict} {verdict.detail}".rstrip(),
        f"command  {command}",
        f"log      {job.log}",
        f"time     {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
    ]
    if row.progress is not None:
        parts.append(f"reached  iteration {row.progress.iteration} of {row.progress.total}")
    if job.is_active:
        ending = cancel_command(job.id, row.save if job.local else job.id)
        parts.append(f"it is still running; to end it: {ending}")
    parts += ["", "evidence in the log"]
    parts += [f"  {line[:_WIDTH]}" for line in failure.lines or verdict.error_lines or ("nothing: there is no log",)]
    parts += ["", "what was tried"]
    parts += [f"  {line}" for line in remedies_tried or ("nothing: submitting again cannot repair this failure",)]
    parts += ["", "what to look at next", f"  {failure.kind.advice}"]
    if failure.kind is UNKNOWN or not failure.lines:
        parts += ["", "the log's last lines", *(f"  {line[:_WIDTH]}" for line in lines[-_LAST:])]
    text = "\n".join(parts) + "\n"
    name = f"{job.log.stem if job.log is not None else job.id}.report.txt"
    for folder in (job.log.parent if job.log is not None else Path(), Path()):
        try:
            (folder / name).write_text(text, encoding="utf-8")
            return folder / name, text
        except OSError:
            continue
    return Path("(written nowhere)"), text
