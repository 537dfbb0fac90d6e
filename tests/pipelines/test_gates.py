"""Gates: what passes, fails and is missing, case by case; and what is refused of a file of gates."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.neox_arguments import ConfigError
from megatron.pipelines.definition import read_pipeline
from megatron.pipelines.errors import GATE_FAILED, METRIC_MISSING
from megatron.pipelines.gate_verdicts import find_override, has_moved, requirements_digest
from megatron.pipelines.gates import Gate, Requirement, judge, read_gates
from megatron.pipelines.measurements import Measurements, MissingError, read_measurements, scores_of_results
from megatron.pipelines.promotion import promoted_weights
from megatron.pipelines.state import add_override, read_overrides
from tests.launch.runs import ROOT
from tests.pipelines.small import write_small

NAN, INF = math.nan, math.inf
STAGES = ["pretrain", "sft", "dpo"]
LOSS, ACC = "train/lm_loss", "eval_tasks/piqa_acc"


def rows(*values: Any, interval: int = 10, name: str = LOSS, **extra_metrics: Any) -> tuple[dict[str, Any], ...]:
    """A row of metrics.jsonl every so many steps."""
    return tuple({"iteration": interval * i, name: value, **extra_metrics} for i, value in enumerate(values, 1))


def measured(*values: Any, **scores: Any) -> Measurements:
    """Losses every ten steps, and scores of piqa: acc=0.7, acc_stderr=0.01."""
    return Measurements(rows(*values), {f"eval_tasks/piqa_{name}": value for name, value in scores.items()})


FALLING = measured(4.0, 3.0, 2.0, 1.0)
P, F, M = "pass", "fail", "missing"
# (what is required, the stage's measurements, the baseline's, the result)
ABSOLUTE: list[tuple[dict[str, Any], Measurements, str]] = [
    ({"max": 1.0}, FALLING, P),  # the bound itself is inside
    ({"max": 0.999}, FALLING, F),
    ({"min": 1.0}, FALLING, P),
    ({"min": 1.001}, FALLING, F),
    ({"min": 0.5, "max": 1.5}, FALLING, P),
    ({"min": 0.1, "max": 0.5}, FALLING, F),
    ({"min": 1.1, "max": 1.5}, FALLING, F),
    ({"max": -1.0}, measured(-2.0), P),
    ({"max": 0}, measured(0), P),  # a count
    ({"max": 0}, measured(1), F),
    ({"max": 2.0}, measured(1.0, NAN), F),
    ({"min": 0.0}, measured(NAN), F),
    ({"max": 2.0}, measured(NAN, 1.0), P),  # the last value counts
    ({"min": 0.0}, measured(INF), F),
    ({"max": 0.0}, measured(-INF), F),
    ({"max": 2.0}, measured(1.0, None), F),  # null is no number
    ({"max": 2.0}, measured(1.0, "nan"), F),
    ({"max": 2.0}, measured(), M),
    ({"metric": "train/lm_los", "max": 2.0}, FALLING, M),
    ({"metric": ACC, "min": 0.5}, FALLING, M),
    ({"metric": ACC, "min": 0.5}, measured(acc=0.5), P),
    ({"metric": ACC, "min": 0.5}, measured(acc=0.49), F),
    ({"metric": ACC, "min": 0.5}, measured(acc=NAN), F),
]
WINDOWS: list[tuple[dict[str, Any], Measurements, str]] = [
    ({"window": 20, "max": 1.5}, FALLING, P),  # of 1 and 2
    ({"window": 20, "max": 1.4}, FALLING, F),
    ({"window": 40, "max": 2.5}, FALLING, P),  # the whole run
    ({"window": 41, "max": 9.0}, FALLING, M),  # longer than the run
    ({"window": "50%", "max": 1.5}, FALLING, P),
    ({"window": "50%", "max": 1.4}, FALLING, F),
    ({"window": "1%", "max": 1.0}, FALLING, P),  # one step at least
    ({"window": 20, "aggregate": "max", "max": 1.9}, FALLING, F),
    ({"window": 20, "aggregate": "min", "max": 1.0}, FALLING, P),
    ({"window": 30, "aggregate": "last", "max": 1.0}, FALLING, P),
    ({"window": 20, "max": 9.0}, measured(1.0, NAN, 1.0), F),
    ({"window": 10, "max": 9.0}, measured(1.0, NAN, 1.0), P),  # before the window
    ({"window": 20, "aggregate": "min", "max": 9.0}, measured(1.0, NAN, 1.0), F),
    ({"window": 20, "aggregate": "max", "max": 9.0}, measured(1.0, NAN, 1.0), F),
    ({"window": 20, "max": 9.0}, measured(1.0, INF, 1.0), F),
    ({"window": 20, "max": 9.0}, Measurements((*rows(1.0, 1.0), {"iteration": 90})), M),  # not logged of late
    ({"metric": ACC, "window": 20, "min": 0.1}, measured(acc=0.5), M),  # a score has none
]
STDERR: list[tuple[dict[str, Any], Measurements, str]] = [
    ({"metric": ACC, "min": 0.5, "stderr_z": 2}, measured(acc=0.52, acc_stderr=0.01), P),
    ({"metric": ACC, "min": 0.5, "stderr_z": 2.1}, measured(acc=0.52, acc_stderr=0.01), F),
    ({"metric": ACC, "min": 0.5, "stderr_z": 0}, measured(acc=0.5, acc_stderr=0.2), P),
    ({"metric": ACC, "max": 0.5, "stderr_z": 1}, measured(acc=0.495, acc_stderr=0.01), F),
    ({"metric": ACC, "max": 0.5, "stderr_z": 1}, measured(acc=0.49, acc_stderr=0.01), P),
    ({"metric": ACC, "min": 0.5, "stderr_z": 1}, measured(acc=0.9), M),  # no standard error is known
    ({"metric": ACC, "min": 0.5, "stderr_z": 1}, measured(acc=0.9, acc_stderr=NAN), F),
    ({"max": 9.0, "stderr_z": 1}, FALLING, M),  # one value has none
    ({"window": 20, "max": 2.0, "stderr_z": 1}, FALLING, P),  # 1.5 + 0.5
    ({"window": 20, "max": 1.99, "stderr_z": 1}, FALLING, F),
    ({"window": 20, "min": 1.0, "stderr_z": 1}, FALLING, P),
    ({"window": 20, "min": 1.01, "stderr_z": 1}, FALLING, F),
]
REGRESSION: list[tuple[dict[str, Any], Measurements, Measurements | None, str]] = [
    ({"metric": ACC, "max_drop": 0.01}, measured(acc=0.695), measured(acc=0.7), P),
    ({"metric": ACC, "max_drop": 0.01}, measured(acc=0.68), measured(acc=0.7), F),
    ({"metric": ACC, "max_drop": 0.0}, measured(acc=0.7), measured(acc=0.7), P),
    ({"metric": ACC, "max_drop": 0.0}, measured(acc=0.9), measured(acc=0.7), P),  # better
    ({"metric": ACC, "max_drop": "2%"}, measured(acc=0.69), measured(acc=0.7), P),  # 0.686
    ({"metric": ACC, "max_drop": "1%"}, measured(acc=0.69), measured(acc=0.7), F),  # 0.693
    ({"metric": ACC, "max_drop": 0.01}, measured(acc=0.7), None, M),
    ({"metric": ACC, "max_drop": 0.01}, measured(acc=0.7), measured(), M),
    ({"metric": ACC, "max_drop": 0.01}, measured(), measured(acc=0.7), M),
    ({"metric": ACC, "max_drop": 0.01}, measured(acc=0.7), measured(acc=NAN), F),
    ({"metric": ACC, "max_drop": 0.01}, measured(acc=0.7), measured(acc=INF), F),
    ({"max_rise": 0.1}, FALLING, measured(0.95), P),
    ({"max_rise": 0.1}, FALLING, measured(0.85), F),
    ({"max_rise": "10%"}, FALLING, measured(0.95), P),
    ({"max_rise": "10%"}, measured(-1.0), measured(-1.05), P),  # of the size of a negative value
    ({"max_rise": 0.5, "window": 20}, FALLING, measured(1.0, 1.0), P),
    ({"max_rise": 0.5, "window": 20}, FALLING, measured(9.0), M),  # the baseline's run is shorter
    ({"max": 2.0, "max_rise": 0.1}, FALLING, measured(0.5), F),  # one of two bounds
    ({"max": 2.0, "max_rise": 0.1}, FALLING, None, M),
    ({"metric": ACC, "max_drop": 0.05, "stderr_z": 1}, measured(acc=0.7, acc_stderr=0.03),
     measured(acc=0.7, acc_stderr=0.04), P),  # 0.7 - 0.05 >= 0.65
    ({"metric": ACC, "max_drop": 0.049, "stderr_z": 1}, measured(acc=0.7, acc_stderr=0.03),
     measured(acc=0.7, acc_stderr=0.04), F),
    ({"metric": ACC, "max_drop": 0.5, "stderr_z": 1}, measured(acc=0.7, acc_stderr=0.03), measured(acc=0.7), M),
]  # fmt: skip
CASES = [
    (required, measurements, None, result) for required, measurements, result in [*ABSOLUTE, *WINDOWS, *STDERR]
] + REGRESSION


def gate_of(tmp_path: Path, *require: dict[str, Any]) -> Any:
    path = tmp_path / "gates.yml"
    path.write_text(yaml.safe_dump({"sft": {"baseline": "pretrain", "require": list(require)}}))
    return read_gates(path, STAGES)["sft"]


@pytest.mark.parametrize(("required", "measurements", "baseline", "result"), CASES, ids=range(len(CASES)))
def test_case(tmp_path, required, measurements, baseline, result):
    judgement = judge(gate_of(tmp_path, {"metric": LOSS, **required}), measurements, baseline)
    assert judgement.result == result, judgement.checks
    assert judgement.exit_code == {P: 0, F: GATE_FAILED, M: METRIC_MISSING}[result] == {P: 0, F: 3, M: 4}[result]
    assert all(check.result in str(check) for check in judgement.checks)


def test_several_checks_their_numbers_and_nearest_names(tmp_path):
    gate = gate_of(tmp_path, {"metric": LOSS, "max": 0.5}, {"metric": "train/none", "max": 1.0})
    judgement = judge(gate, FALLING, None)
    assert [check.result for check in judgement.checks] == ["fail", "missing"]
    assert judgement.exit_code == 4
    gate = gate_of(tmp_path, {"metric": LOSS, "max_rise": "10%", "window": 20, "stderr_z": 2})
    (check,) = judge(gate, FALLING, measured(1.0, 1.2)).checks
    assert check.value == 1.5 and check.baseline_value == 1.1
    assert check.limit == pytest.approx(1.21)
    assert check.stderr == pytest.approx(math.hypot(0.5, 0.1))
    assert check.window == {"first": 30, "last": 40, "rows": 2, "steps": 20, "aggregate": "mean"}
    (check,) = judge(gate_of(tmp_path, {"metric": "train/loss", "max": 1.0}), FALLING, None).checks
    assert "train/lm_loss" in str(check)


@pytest.mark.parametrize(("text", "message"), [
    ("sft: {require: [{metric: a}]}", "sft.require.0: a: has no bound"),
    ("sft: {require: [{max: 1}]}", "sft.require.0.metric: is required"),
    ("sft: {require: [{metric: a, maximum: 1}]}", "maximum"),
    ("sft: {require: [{metric: a, max: often}]}", "expected float"),
    ("sft: {require: [{metric: a, max: .nan}]}", "expected float"),
    ("sft: {require: [{metric: a, min: 2, max: 1}]}", "no value can pass"),
    ("sft: {require: [{metric: a, max_drop: 0.1}]}", "set baseline"),
    ("sft: {baseline: dpo, require: [{metric: a, max_drop: 0.1}]}", "dpo is not an earlier training stage"),
    ("sft: {baseline: sft, require: [{metric: a, max_drop: 0.1}]}", "sft is not an earlier training stage"),
    ("sft: {baseline: pretrain, require: [{metric: a, max_drop: -0.1}]}", "at least 0"),
    ("sft: {baseline: pretrain, require: [{metric: a, max_drop: much}]}", "a share such as 2%"),
    ("sft: {require: [{metric: a, max: 1, window: 0}]}", "at least 1 step"),
    ("sft: {require: [{metric: a, max: 1, window: 200%}]}", "a share of the run"),
    ("sft: {require: [{metric: a, max: 1, aggregate: max}]}", "no effect without window"),
    ("sft: {require: [{metric: a, max: 1, stderr_z: -1}]}", "stderr_z"),
    ("sft: {require: []}", "is empty"),
    ("sft: {require: 3}", "expected a list"),
    ("sft: {}", "sft.require: is required"),
    ("stf: {require: [{metric: a, max: 1}]}", "stf: is not a training stage"),
    ("sft: [1]", "expected a mapping"),
    ("sft: {require: [{metric: a, max: 1}], require: [{metric: b, max: 1}]}", "already set"),
    ("- 1", "expected `key: value` lines"),
    ("sft: {", "not valid YAML"),
])  # fmt: skip
def test_refused(tmp_path, text, message):
    path = tmp_path / "gates.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="gates.yml") as refused:
        read_gates(path, STAGES)
    assert message in str(refused.value)
    assert text == "- 1" or "gates.yml:1" in str(refused.value)


def test_rows_of_a_run_that_was_killed_and_scores_of_eval(tmp_path):
    """A step that was logged twice counts once, as it was logged last, and half a line not at all."""
    lines = [json.dumps({"iteration": i, LOSS: value}) for i, value in ((10, 4.0), (20, 3.0), (20, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"iteration": 30, "tra']))
    measurements = read_measurements(tmp_path)
    assert measurements.measure(LOSS, 20).value == 3.0 and measurements.measure(LOSS).value == 2.0
    values = {"acc,none": 0.7, "acc_stderr,none": 0.01, "em,strict-match": 0.2, "em_stderr,strict-match": 0.02}
    (tmp_path / "results.json").write_text(json.dumps({"results": {"piqa": {"alias": "piqa", **values}}}))
    em = "eval_tasks/piqa_em_strict-match"
    expected = {ACC: 0.7, f"{ACC}_stderr": 0.01, em: 0.2, f"{em}_stderr": 0.02}
    assert scores_of_results(tmp_path / "results.json") == expected


@pytest.mark.parametrize("file", ["configs/promotion_gates.yml",
                                  "configs/pipelines/quickstart/configs/promotion_gates.yml"])  # fmt: skip
def test_gates_that_come_with_the_package(file):
    assert read_gates(ROOT / file, ["pretrain", "sft", "dpo", "lora"])


# (override of: stage, weights, gate's maximum, baseline's weights), a verdict on these, whether it holds
@pytest.mark.parametrize(("overridden_verdict", "judged_verdict", "holds"), [
    (("sft", "a", 1.0, "p"), ("sft", "a", 1.0, "p"), True),
    (("sft", "a", 1.0, None), ("sft", "a", 1.0, None), True),
    (("sft", "a", 1.0, "p"), ("sft", "b", 1.0, "p"), False),  # other weights
    (("sft", "a", 1.0, "p"), ("sft", "a", 0.9, "p"), False),  # another gate
    (("sft", "a", 1.0, "p"), ("dpo", "a", 1.0, "p"), False),  # another stage
    (("sft", "a", 1.0, "p"), ("sft", "a", 1.0, "q"), False),  # the baseline has moved
    (("sft", "a", 1.0, "p"), ("sft", "a", 1.0, None), False),
])  # fmt: skip
def test_override(tmp_path, overridden_verdict, judged_verdict, holds):
    def verdict(stage: str, weights: str, maximum: float, baseline: str | None) -> dict[str, Any]:
        gate = Gate(stage, (Requirement(LOSS, max=maximum),))
        baseline_facts = {"stage": "pretrain", "weights_sha256": baseline} if baseline else None
        return {"stage": stage, "weights_sha256": weights, "requirements": requirements_digest(gate),
                "baseline": baseline_facts, "file": "logs/verdicts/sft-1.json"}  # fmt: skip

    for reason in ("first", "second"):
        add_override(tmp_path, verdict(*overridden_verdict), reason)
    override = find_override(tmp_path, verdict(*judged_verdict))
    assert (override is not None) == holds
    assert override is None or (override.reason, override.sha256) == ("second", "a")
    assert [recorded.reason for recorded in read_overrides(tmp_path)] == ["first", "second"], "nothing is forgotten"


# rows, iteration of the weights, metric, window, what is said
@pytest.mark.parametrize(("metric_rows", "iteration", "metric", "window", "message"), [
    (rows(3.0, 2.0), 25, LOSS, None, None),  # logged every ten steps: the next row would be that of 30
    (rows(3.0, 2.0), 30, LOSS, None, "logged at iteration 20, but the weights are of iteration 30"),
    (rows(3.0), 9, LOSS, None, None),
    ((*rows(3.0, 2.0), {"iteration": 30, "train/grad_norm": 1.0}), 30, LOSS, None, "no value at iteration 30"),
    ((*rows(3.0, 2.0), {"iteration": 30, "train/grad_norm": 1.0}), 30, LOSS, 20, "no value at iteration 30"),
    ((*rows(3.0, 2.0), {"iteration": 30, "validation/lm_loss": 1.0}), 20, LOSS, 20, None),
    (rows(3.0, name="validation/lm_loss"), 10, "validation/lm_loss", None, None),
    (rows(3.0, name="validation/lm_loss"), 11, "validation/lm_loss", None, "the weights are of iteration 11"),
    ((*rows(3.0), {"iteration": 11, "train/lm_loss": 1.0}), 11, ACC, None, "no metric "),
])  # fmt: skip
def test_what_was_measured_of_other_weights_is_missing(metric_rows, iteration, metric, window, message):
    measurements = Measurements(metric_rows, {}, iteration)
    with pytest.raises(MissingError, match=message) if message else nullcontext():
        assert measurements.measure(metric, window).value > 0


@pytest.mark.parametrize(("share", "steps"), [(0.07, 7), (0.55, 55), (0.1, 10), (0.001, 1)])
def test_a_share_of_a_hundred_steps(share, steps):
    assert Measurements(rows(*[1.0] * 100, interval=1)).measure(LOSS, share).window["steps"] == steps


@pytest.mark.parametrize(("digest_before", "now", "moved"), [
    ("a", "a", False), ("a", "b", True), ("a", None, True), (None, "a", True), (None, None, False),
])  # fmt: skip
def test_baseline_moved(tmp_path, digest_before, now, moved):
    """The digest of the weights that a verdict compared with, and that of those there are now."""
    pipeline = read_pipeline(write_small(tmp_path / "p") / "pipeline.yml")
    final, layer = tmp_path / "p/checkpoints/pretrain_final", "layer_00-model_00-model_states.pt"

    def digest(content: str | None) -> str | None:
        shutil.rmtree(final, ignore_errors=True)
        if content is None:
            return None
        (final / "global_step1").mkdir(parents=True)
        (final / "latest").write_text("global_step1")
        (final / "global_step1" / layer).write_text("x")
        manifest = {"files": {layer: {"sha256": content, "size": 1}}}
        (final / "global_step1/manifest.json").write_text(json.dumps(manifest))
        return promoted_weights(final)

    verdict = {"baseline": {"stage": "pretrain", "weights_sha256": digest(digest_before)}}
    digest(now)
    assert has_moved(pipeline, verdict) == moved
    assert not has_moved(pipeline, {"baseline": None})
