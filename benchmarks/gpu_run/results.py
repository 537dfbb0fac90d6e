"""The results of `make gpu` as a file of JSON, written again after every part, and as lines on a screen."""

import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_run.parts import Part
from benchmarks.gpu_run.process import ROOT, Outcome

FORMAT = 1  # of the file, for who reads it later


def commit() -> str:
    """Returns the commit of this working tree, with + if files are changed; "" if git fails."""
    if shutil.which("git") is None:
        return ""
    outputs = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(output.returncode for output in outputs):
        return ""
    return outputs[0].stdout.strip() + ("+" if outputs[1].stdout.strip() else "")


def card_of(device: str) -> str:
    """Returns the card as file names have it: h200 for the device "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


def write(path: Path, header: Mapping[str, Any], parts: Sequence[Part], outcomes: Mapping[str, Outcome]) -> None:
    """Writes all outcomes so far into the results file, which is replaced atomically."""
    rows = []
    for part in parts:
        if part.name in outcomes:
            rows.append({"about": part.description, "beside": part.baseline, **asdict(outcomes[part.name])})
    text = json.dumps({"format": FORMAT, **header, "parts": rows}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def read(path: Path) -> dict[str, Any]:
    """Reads a results file that `write` wrote. Raises ValueError for any other file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path}: not valid JSON ({problem})") from None
    if content.get("format") != FORMAT:
        raise ValueError(f"{path}: not a results file of format {FORMAT}")
    return content


def earlier(path: Path) -> dict[str, Outcome]:
    """Returns the outcomes in a results file by part. A part that was running gets the state `cut`."""
    names = Outcome.__dataclass_fields__
    rows = [{key: row[key] for key in names if key in row} for row in read(path)["parts"]]
    for row in rows:
        if row["state"] == "running":
            row |= {"state": "cut", "reason": "its run was killed"}
    return {row["name"]: Outcome(**row) for row in rows}


def tokens_per_second(result: Mapping[str, Any] | None) -> float | None:
    """Returns the tokens per second in a part's result; None unless it timed exactly one contestant."""
    rows = (result or {}).get("rows", [])
    return rows[0]["tokens"] if len(rows) == 1 and "tokens" in rows[0] else None


def speed_ratio(part_row: Mapping[str, Any], partner_row: Mapping[str, Any] | None) -> float | None:
    """Returns the tokens per second of a part divided by its partner's; None unless the same run timed both.

    GPU clocks differ between runs. part_row, partner_row: rows of a results file.
    """
    if partner_row is None or partner_row.get("run", "") != part_row.get("run", ""):
        return None
    speed, partner_speed = (tokens_per_second(row["result"]) for row in (part_row, partner_row))
    return None if speed is None or partner_speed is None else speed / partner_speed


def _head_words(row: Mapping[str, Any]) -> str:
    """Describes one row of head_loss.py in words; times are included if it ran on a GPU."""
    words = [f"peak {row['peak'] / 1e9:.2f} GB"]
    if row["milliseconds"] is not None:
        words = [f"{row['milliseconds']:.1f} ms", f"{row['over_floor']:.2f} times the products alone", *words]
    return f"{row['name']}: {', '.join(words)}"


def lines(outcome: Outcome, outcomes: Mapping[str, Outcome], baseline: str | None) -> list[str]:
    """Describes a part's outcome in lines: a summary, failed and skipped tests, or the end of its log."""
    words = "; ".join(filter(None, (summary(outcome, outcomes, baseline), outcome.reason)))
    text_lines = [f"{outcome.name:<24} {outcome.state}, {outcome.seconds:.0f} s: {words}"]
    if "gaps" in (outcome.result or {}):
        text_lines += [
            f"    {row['kind']:<22} {row['seconds'] * 1e3:8.1f} ms, floor {row['floor_ms']:8.1f}"
            for row in (outcome.result or {})["rows"]
        ]
    for row in outcome.tests:
        if row["outcome"] == "failed":
            text_lines.append(f"    failed {row['name']}: {row['reason'].splitlines()[0] if row['reason'] else ''}")
    skipped = Counter(row["reason"] for row in outcome.tests if row["outcome"] == "skipped")
    text_lines += [f"    skipped {count}: {reason}" for reason, count in skipped.items()]
    if not outcome.tests:
        text_lines += [f"    {line}" for line in outcome.log.splitlines()[-12:]]
    return text_lines


def summary(outcome: Outcome, outcomes: Mapping[str, Outcome], baseline: str | None) -> str:
    """Summarizes a part's results in one line."""
    if outcome.tests:
        counts = Counter(row["outcome"] for row in outcome.tests)
        return ", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped") if counts[state])
    measured = outcome.result or {}
    if "product_flops" in measured:
        rates = [f"{name} {flops / 1e12:.4g} TFLOP/s" for name, flops in measured["product_flops"].items()]
        copies = f"{measured['copy_bytes_per_second'] / 1e12:.3g} TB/s"
        return f"{measured['device']}: products {', '.join(rates)}; copies {copies}"
    if "gaps" in measured:
        return f"{measured['step_seconds'] * 1e3:.1f} ms a step; {measured['gaps']}"
    rows = measured.get("rows", [])
    if len(rows) == 1 and "model_flops" in rows[0]:
        row, words = rows[0], []
        words.append(f"{row['model_flops'] / 1e12:.4g} TFLOP/s, {row['of_ceiling']:.1%} of the ceiling")
        partner = outcomes.get(baseline or "")
        ratio = speed_ratio(asdict(outcome), None if partner is None else asdict(partner))
        if ratio is not None:
            words.append(f"{ratio:.3f} of the speed of: {baseline}")
        return ", ".join([*words, f"peak {row['peak_bytes'] / 1e9:.1f} GB"])
    if rows and "generation" in rows[0]:
        words = [f"{row['generation']}, {row['name']} {row['tokens_per_second']:,.0f} tokens/s" for row in rows]
        update = measured.get("hand_over")
        words += [f"{update['name']} {update['seconds']:.2f} s, {update['bytes'] / 1e9:.2f} GB"] if update else []
        return "; ".join(words)
    if rows and "beside_ours" in rows[0]:
        return "; ".join(f"{row['name']} {row['seconds'] * 1e3:.1f} ms" for row in rows)
    if rows and "over_floor" in rows[0]:
        return "; ".join(_head_words(row) for row in rows)
    if rows and "pairs_per_second" in rows[0]:
        words = [f"{row['name'].split(':')[0]} {row['pairs_per_second']:.2f} pairs/s" for row in rows]
        ratios = [row["ratio"] for row in rows[1:]]
        return ", ".join(words) + (f"; ours is {statistics.median(ratios):.2f} times as fast" if ratios else "")
    return ""
