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
    """The commit of this tree, with + where files differ from it; "" where git does not say."""
    if shutil.which("git") is None:
        return ""
    asked = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(one.returncode for one in asked):
        return ""
    return asked[0].stdout.strip() + ("+" if asked[1].stdout.strip() else "")


def card_of(device: str) -> str:
    """The kind of card in the names of files: "NVIDIA H200" is h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


def write(path: Path, about: Mapping[str, Any], parts: Sequence[Part], outcomes: Mapping[str, Outcome]) -> None:
    """Write the table of what has run until now; whoever reads the file sees a whole one."""
    rows = []
    for part in parts:
        if part.name in outcomes:
            rows.append({"about": part.about, "beside": part.beside, **asdict(outcomes[part.name])})
    text = json.dumps({"format": FORMAT, **about, "parts": rows}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote. Raises ValueError for a file of another format."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path}: no JSON ({problem})") from None
    if found.get("format") != FORMAT:
        raise ValueError(f"{path}: not a results file of format {FORMAT}")
    return found


def earlier(path: Path) -> dict[str, Outcome]:
    """The outcomes of a file, by name; parts that ran when their run was killed are cut."""
    names = Outcome.__dataclass_fields__
    rows = [{key: row[key] for key in names if key in row} for row in read(path)["parts"]]
    for row in rows:
        if row["state"] == "running":
            row |= {"state": "cut", "reason": "its run was killed"}
    return {row["name"]: Outcome(**row) for row in rows}


def seconds_of(result: Mapping[str, Any] | None) -> float | None:
    """Seconds of a step of the one contestant that a part has timed."""
    rows = (result or {}).get("rows", [])
    return rows[0]["seconds"] if len(rows) == 1 and "seconds" in rows[0] else None


def _head_words(row: Mapping[str, Any]) -> str:
    """One way to make the logits and their loss; times are there on a GPU alone."""
    words = [f"peak {row['peak'] / 1e9:.2f} GB"]
    if row["milliseconds"] is not None:
        words = [f"{row['milliseconds']:.1f} ms", f"{row['over_floor']:.2f} times the products alone", *words]
    return f"{row['name']}: {', '.join(words)}"


def lines(outcome: Outcome, outcomes: Mapping[str, Outcome], beside: str | None) -> list[str]:
    """What became of a part: a line, its failed and skipped tests, or the end of its log."""
    words = "; ".join(filter(None, (summary(outcome, outcomes, beside), outcome.reason)))
    made = [f"{outcome.name:<24} {outcome.state}, {outcome.seconds:.0f} s: {words}"]
    if "gaps" in (outcome.result or {}):
        made += [
            f"    {row['kind']:<22} {row['seconds'] * 1e3:8.1f} ms, floor {row['floor_ms']:8.1f}"
            for row in (outcome.result or {})["rows"]
        ]
    for row in outcome.tests:
        if row["outcome"] == "failed":
            made.append(f"    failed {row['name']}: {row['reason'].splitlines()[0] if row['reason'] else ''}")
    skipped = Counter(row["reason"] for row in outcome.tests if row["outcome"] == "skipped")
    made += [f"    skipped {count}: {reason}" for reason, count in skipped.items()]
    if not outcome.tests:
        made += [f"    {line}" for line in outcome.log.splitlines()[-12:]]
    return made


def summary(outcome: Outcome, outcomes: Mapping[str, Outcome], beside: str | None) -> str:
    """What a part found, in a line."""
    if outcome.tests:
        counts = Counter(row["outcome"] for row in outcome.tests)
        return ", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped") if counts[state])
    found = outcome.result or {}
    if "product_flops" in found:
        rates = [f"{name} {flops / 1e12:.4g} TFLOP/s" for name, flops in found["product_flops"].items()]
        return (
            f"{found['device']}: products {', '.join(rates)}; copies {found['copy_bytes_per_second'] / 1e12:.3g} TB/s"
        )
    if "gaps" in found:
        return f"{found['step_seconds'] * 1e3:.1f} ms a step; {found['gaps']}"
    rows = found.get("rows", [])
    if len(rows) == 1 and "model_flops" in rows[0]:
        row, words = rows[0], []
        words.append(f"{row['model_flops'] / 1e12:.4g} TFLOP/s, {row['of_ceiling']:.1%} of the ceiling")
        partner = outcomes.get(beside or "")
        own, other = seconds_of(found), seconds_of(partner.result) if partner is not None else None
        # A card's clocks are others in another run
        if own is not None and other is not None and partner is not None and partner.run == outcome.run:
            words.append(f"{other / own:.3f} of the speed of: {beside}")
        return ", ".join([*words, f"peak {row['peak_bytes'] / 1e9:.1f} GB"])
    if rows and "beside_ours" in rows[0]:
        return "; ".join(f"{row['name']} {row['seconds'] * 1e3:.1f} ms" for row in rows)
    if rows and "over_floor" in rows[0]:
        return "; ".join(_head_words(row) for row in rows)
    if rows and "pairs_per_second" in rows[0]:
        words = [f"{row['name'].split(':')[0]} {row['pairs_per_second']:.2f} pairs/s" for row in rows]
        ratios = [row["ratio"] for row in rows[1:]]
        return ", ".join(words) + (f"; ours is {statistics.median(ratios):.2f} times as fast" if ratios else "")
    return ""
