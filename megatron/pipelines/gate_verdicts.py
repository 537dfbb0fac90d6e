"""Judges stages by their gates, writes the verdicts to files, and finds overrides of verdicts by a person."""

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
from megatron.process.run_files import Shape, Unfit, complete, list_of, read_object, seconds, text

FOLDER = Path("logs/verdicts")
_SHAPE: Shape = {
    "stage": text, "result": text, "time": seconds, "weights_sha256": text, "requirements": text,
    "lines": list_of(text), "file": text,
}  # fmt: skip
"""The fields that a verdict's file must have, with their types."""


def gates_of(pipeline: Pipeline) -> dict[str, Gate]:
    """Returns the gates of a pipeline by the name of the training stage; {} if it has no gates file.

    Raises ConfigError for mistakes in the file.
    """
    stages = [stage.name for stage in pipeline.stages if stage.kind == "train"]
    return {} if pipeline.gates is None else read_gates(pipeline.gates, stages)


def requirements_digest(gate: Gate | None) -> str | None:
    """Returns a SHA-256 of a gate's requirements, to detect changes of the gate; None without a gate."""
    return digest(asdict(gate)) if gate is not None else None


def judge_stage(pipeline: Pipeline, stage: Stage, gate: Gate, record: StageRecord) -> dict[str, Any]:
    """Judges a stage's result by its gate. Writes the verdict to `logs/verdicts/<stage>-N.json`, and returns
    it.

    record: the stage's record, which names its weights and evaluation. Some entries of the verdict:

    `result`: pass, fail or missing (a metric is missing).
    `exit_code`: 0, 3 or 4 for these results.
    `checks`: each bound of the gate with the compared numbers.
    `lines`: the checks as text.
    `weights_sha256`: digest of the judged weights.
    `baseline`: the baseline stage, and the digest of its weights; None without a baseline.
    `requirements`: digest of the gate.
    `file`: path of the verdict, relative to the pipeline's folder.
    """
    folder = pipeline.folder
    scores = folder / record.evaluation["scores"] if record.evaluation else None
    checkpoint = Path(record.weights["checkpoint"])
    measured = read_measurements(logs_of(pipeline, stage, record), scores, iteration_of(checkpoint))
    baseline, baseline_info = None, None
    if gate.baseline is not None:
        final = pipeline.final(gate.baseline)
        baseline = promoted_measurements(final)
        baseline_info = {"stage": gate.baseline, "weights_sha256": promoted_weights(final)}
    judgement = judge(gate, measured, baseline)
    file = FOLDER / f"{stage.name}-{max(_numbered(folder, stage.name), default=0) + 1}.json"
    verdict = {
        "stage": stage.name, "result": judgement.result, "exit_code": judgement.exit_code, "time": time.time(),
        "weights_sha256": record.weights.get("sha256"), "baseline": baseline_info,
        "requirements": requirements_digest(gate), "checks": [_json_value(asdict(check)) for check in judgement.checks],
        "lines": [str(check) for check in judgement.checks], "file": str(file), "override": None,
    }  # fmt: skip
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(folder / file, verdict)
    return verdict


def read_verdicts(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Returns all verdicts on a stage, the oldest first. folder: the pipeline's folder."""
    return [read_verdict(folder, str(path)) for _, path in sorted(_numbered(folder, stage).items())]


def read_verdict(folder: Path, file: str) -> dict[str, Any]:
    """Reads a verdict from its file. Raises PipelineError if the file cannot be read.

    folder: the pipeline's folder. file: path relative to it, such as `logs/verdicts/sft-1.json`.
    """
    try:
        verdict = read_object(folder / file)
        return {**verdict, **complete(_SHAPE)(verdict)}
    except FileNotFoundError:
        raise PipelineError(f"{folder / file}: the verdict no longer exists; run `gate` to judge again") from None
    except (OSError, ValueError, Unfit) as problem:
        raise PipelineError(
            f"{folder / file}: the verdict cannot be read ({problem}); move the file away, and run `gate`"
        ) from None


def _numbered(folder: Path, stage: str) -> dict[int, Path]:
    """Returns the files of the verdicts on a stage by the number in their names; paths relative to
    `folder`."""
    verdicts = {}
    for path in (folder / FOLDER).glob("*.json"):
        if match := re.fullmatch(rf"{re.escape(stage)}-(\d+)\.json", path.name):
            verdicts[int(match[1])] = FOLDER / path.name
    return verdicts


def logs_of(pipeline: Pipeline, stage: Stage, record: StageRecord) -> Path:
    """Returns the folder that has the metrics.jsonl of a stage's run.

    It is the run's log folder; if that has none any more, it is the folder of the promoted weights."""
    logs = pipeline.save(stage.name) / "logs"
    final = pipeline.final(stage.name)
    is_promoted = not (logs / METRICS_FILE).is_file() and promoted_weights(final) == record.weights.get("sha256")
    return final.resolve() if is_promoted else logs


def has_moved(pipeline: Pipeline, verdict: Mapping[str, Any]) -> bool:
    """Returns whether the baseline stage now has other promoted weights than when the verdict compared with
    it."""
    baseline = verdict.get("baseline")
    if not baseline:
        return False
    return bool(promoted_weights(pipeline.final(baseline["stage"])) != baseline["weights_sha256"])


def find_override(folder: Path, verdict: Mapping[str, Any]) -> Override | None:
    """Returns the newest override that applies to a verdict; None if there is none.

    It applies if stage, weights, gate and the baseline's weights are the same. folder: the pipeline's
    folder."""
    baseline = (verdict["baseline"] or {}).get("weights_sha256")
    key = (verdict["stage"], verdict["weights_sha256"], verdict["requirements"], baseline)
    for override in reversed(read_overrides(folder)):
        if (override.stage, override.sha256, override.requirements, override.baseline) == key:
            return override
    return None


def _json_value(value: Any) -> Any:
    """Returns the value with NaN and infinity, which JSON lacks, replaced by text; also inside mappings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _json_value(inner) for name, inner in value.items()}
    return value
