"""Texts about a watched run for a person: its share of the device's peak, and a one-page report of a
failure."""

import time
from collections.abc import Sequence
from pathlib import Path

from megatron.operations.jobs.failures import UNKNOWN, Failure
from megatron.operations.jobs.overview import Row
from megatron.operations.jobs.request import Request

_LAST = 25  # lines of a log shown where no line explains the failure
_WIDTH = 200
# Dense bf16 TFLOP/s of one device, from the vendors' data sheets, without variants of the same name that have
# another peak (H100 PCIe, NVL).
PEAKS = {"A40": 149.7, "A100": 312.0, "L40S": 362.0, "GH200": 989.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}
_DIFFERENT_PEAK = ("PCIe", "NVL")


def share_of_peak(row: Row) -> str:
    """Returns a text with the model's FLOP/s as a share of the device's peak, or why it is unknown."""
    if row.utilization is not None:
        return f"{row.utilization:.1%} of peak (peak_theoretical_tflops)"
    name = row.device or ""
    words = name.replace("-", " ").split()
    peak = next((value for model, value in PEAKS.items() if model in words), None)
    if (
        peak is None
        or row.model_flops is None
        or ("H100" in words and any(variant in name for variant in _DIFFERENT_PEAK))
    ):
        return "share of peak unknown: set peak_theoretical_tflops"
    return f"{row.model_flops / (peak * 1e12):.1%} of peak ({peak:g} dense bf16 TFLOP/s of {name})"


def write_report(
    request: Request, row: Row, failure: Failure, remedies_tried: Sequence[str], command: str, lines: Sequence[str]
) -> tuple[Path, str]:
    """Writes a one-page report beside the log, or in the current folder if that fails. Returns its file and
    text."""
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
        parts.append(f"it is still running; this ends it: {_cancel_command(row)}")
    parts += ["", "evidence in the log"]
    parts += [f"  {line[:_WIDTH]}" for line in failure.lines or verdict.error_lines or ("nothing: there is no log",)]
    parts += ["", "what was tried"]
    parts += [f"  {line}" for line in remedies_tried or ("nothing: a retry cannot repair this failure",)]
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


def _cancel_command(row: Row) -> str:
    if row.job.local and row.save is None:  # it has not created its folder yet
        return f"kill {row.job.id}"
    return f"python tools/jobs.py cancel {row.save if row.job.local else row.job.id}"
