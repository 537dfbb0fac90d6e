"""Verdicts of gates: judged, written with every number, and what a person has overridden."""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.data.files import write_json
from megatron.pipelines.definition import Pipeline, Stage
from megatron.pipelines.digests import digest
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.gates import Gate, judge, read_gates
from megatron.pipelines.measurements import read_measurements
from megatron.pipelines.promotion import iteration_of, promoted_measurements, promoted_weights
from megatron.pipelines.state import Override, StageRecord, read_overrides
from megatron.process.metrics_file import METRICS_FILE
from megatron.process.run_files import Shape, Unfit, list_of, read_object, seconds, text, whole

FOLDER = Path("logs/verdicts")
_SHAPE: Shape = {
    "stage": text, "result": text, "time": seconds, "weights_sha256": text, "requirements": text,
    "lines": list_of(text), "file": text,
}  # fmt: skip
"""The fields that every reader of a verdict needs."""


def gates_of(pipeline: Pipeline) -> dict[str, Gate]:
    """The gates of a pipeline's training stages; {} where it has none. Raises ConfigError."""
    if pipeline.gates is None:
        return {}
    return read_gates(pipeline.gates, [stage.name for stage in pipeline.stages if stage.kind == "train"])


def requirements_digest(gate: Gate | None) -> str | None:
    """A digest of what a gate asks for; None without a gate."""
    return digest(asdict(gate)) if gate is not None else None


def judge_stage(pipeline: Pipeline, stage: Stage, gate: Gate, record: StageRecord) -> dict[str, Any]:
    """Judge a stage's result and write the verdict as the next `logs/verdicts/<stage>-N.json`.

    The verdict: `result` (pass, fail, missing), `exit_code`, `checks` with every number, `lines` in words,
    `weights_sha256` and the `baseline` with its digest, `file` relative to the pipeline's folder.
    """
    folder = pipeline.folder
    scores = folder / record.evaluation["scores"] if record.evaluation else None
    checkpoint = Path(record.weights["checkpoint"])
    measured = read_measurements(logs_of(pipeline, stage, record), scores, iteration_of(checkpoint))
    baseline, of_baseline = None, None
    if gate.baseline is not None:
        final = pipeline.final(gate.baseline)
        baseline = promoted_measurements(final)
        of_baseline = {"stage": gate.baseline, "weights_sha256": promoted_weights(final)}
    judgement = judge(gate, measured, baseline)
    file = FOLDER / f"{stage.name}-{max(_numbered(folder, stage.name), default=0) + 1}.json"
    verdict = {
        "stage": stage.name, "result": judgement.result, "exit_code": judgement.exit_code, "time": time.time(),
        "weights_sha256": record.weights.get("sha256"), "baseline": of_baseline,
        "requirements": requirements_digest(gate), "checks": [_plain(asdict(check)) for check in judgement.checks],
        "lines": [str(check) for check in judgement.checks], "file": str(file), "override": None,
    }  # fmt: skip
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(folder / file, verdict)
    return verdict


def read_verdicts(folder: Path, stage: str) -> list[dict[str, Any]]:
    """All verdicts on a stage, the oldest first."""
    return [read_verdict(folder, str(path)) for _, path in sorted(_numbered(folder, stage).items())]


def read_verdict(folder: Path, file: str) -> dict[str, Any]:
    """A verdict, by its `file`. Raises PipelineError for one that cannot be read."""
    try:
        verdict = read_object(folder / file)
        return {**verdict, **whole(_SHAPE)(verdict)}
    except FileNotFoundError:
        raise PipelineError(f"{folder / file}: is not there any more; `gate` judges again") from None
    except (OSError, ValueError, Unfit) as problem:
        raise PipelineError(f"{folder / file}: cannot be read ({problem}); move it away, and judge again") from None


def _numbered(folder: Path, stage: str) -> dict[int, Path]:
    """The verdicts on a stage by number."""
    found = {}
    for path in (folder / FOLDER).glob("*.json"):
        if match := re.fullmatch(rf"{re.escape(stage)}-(\d+)\.json", path.name):
            found[int(match[1])] = FOLDER / path.name
    return found


def logs_of(pipeline: Pipeline, stage: Stage, record: StageRecord) -> Path:
    """The folder with the metrics of a stage's run: its own, or what was promoted of it where that is
    gone."""
    logs = pipeline.save(stage.name) / "logs"
    final = pipeline.final(stage.name)
    is_promoted = not (logs / METRICS_FILE).is_file() and promoted_weights(final) == record.weights.get("sha256")
    return final.resolve() if is_promoted else logs


def has_moved(pipeline: Pipeline, verdict: Mapping[str, Any]) -> bool:
    """Whether the baseline that a verdict compares with has other weights by now."""
    baseline = verdict.get("baseline")
    if not baseline:
        return False
    return bool(promoted_weights(pipeline.final(baseline["stage"])) != baseline["weights_sha256"])


def find_override(folder: Path, verdict: Mapping[str, Any]) -> Override | None:
    """The newest override that is for a verdict's weights, its gate, and the weights that it compares
    with."""
    baseline = (verdict["baseline"] or {}).get("weights_sha256")
    asked = (verdict["stage"], verdict["weights_sha256"], verdict["requirements"], baseline)
    found = [one for one in read_overrides(folder) if (one.stage, one.sha256, one.requirements, one.baseline) == asked]
    return found[-1] if found else None


def _plain(value: Any) -> Any:
    """Numbers that JSON has none for as text: nan, inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value
