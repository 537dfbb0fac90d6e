"""A first step of distillation beside autograd of both models' whole logits, by formulas of others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.callbacks import Parts
from megatron.data import Batch
from megatron.model import Stage
from megatron.model.init import stage_parameters
from tests.methods.distillation.runs import LABELLED, LAYOUTS, hf_folder, student, teacher_keys
from tests.mpu.test_distillation import generalized_jsd, with_rest
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import begin, curves

LOSSES: dict[str, dict[str, Any]] = {
    "forward": {"weight": 0.7}, "reverse": {"beta": 1.0, "temperature": 1.5},
    "jsd": {"beta": 0.3, "temperature": 2.0, "weight": 0.5}, "top": {"top_k": 8, "temperature": 2.0, "weight": 0.8},
}  # fmt: skip


def logits_of(stage: Stage, batch: Batch) -> Tensor:
    """Logits of every place, `[batch, seq, vocab]` float64."""
    return cast(Tensor, stage(None, batch)).transpose(0, 1).double()


def teacher_logits_of(teacher: str) -> Callable[[Batch], Tensor]:
    if Path(teacher, "config.json").exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
        return lambda batch: model(batch.tokens).logits.double()
    stage = begin(teacher_keys(load=teacher, finetune=True)).engine.stage.eval()
    return lambda batch: logits_of(stage, batch)


def expected_sums(student: Tensor, teacher: Tensor, batch: Batch, keys: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The sums of divergence and negative log-likelihood, by formulas of others."""
    beta, temperature, top_k = keys.get("beta", 0.0), keys.get("temperature", 1.0), keys.get("top_k")
    trained = batch.loss_weights > 0
    student, teacher, labels = student[trained], teacher[trained], batch.labels[trained]
    nll = F.cross_entropy(student, labels, reduction="sum")
    if top_k is None:
        return generalized_jsd(student, teacher, beta, temperature).sum(), nll
    ids = teacher.topk(top_k).indices
    log_probs = (with_rest(logits, ids, temperature) for logits in (student, teacher))
    return generalized_jsd(*log_probs, beta, 1.0).sum(), nll


def first_steps(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For the pool: of each run's first step loss, metrics and gradients, and the same by `expected_sums`."""
    teacher_logits, results = teacher_logits_of(runs[0]["distillation"]["teacher"]), []
    for values in runs:
        training, gradients = begin(values), dict[tuple[int, str], Tensor]()
        step, keys, rows = next(batches_of(training)), values["distillation"], training.args.softmax_rows

        def note(parts: Parts, noted: dict[tuple[int, str], Tensor] = gradients) -> None:
            noted.update({name: gradient.double().clone() for name, gradient in parts})

        result = training.engine.train_step(list(step), 0.0, note)
        stage = training.engine.stage
        params = {(layer, name): param for layer, name, param in stage_parameters(stage)}
        sums, count = [torch.zeros((), dtype=torch.float64)] * 2, sum(int(b.loss_weights.sum()) for b in step)
        for batch in step:
            with torch.no_grad():
                teacher_batch_logits = teacher_logits(batch)[..., :rows]
            batch_sums = expected_sums(logits_of(stage, batch)[..., :rows], teacher_batch_logits, batch, keys)
            sums = [total + addend for total, addend in zip(sums, batch_sums, strict=True)]
        weight = keys.get("weight", 1.0)
        loss = (weight * sums[0] + (1 - weight) * sums[1]) / count
        expected = torch.autograd.grad(loss, list(params.values()))
        results.append({
            "actual": [float(result.loss), *(float(result.metrics[name]) for name in ("divergence", "nll"))],
            "reference": [float(loss.detach()), *(float(total.detach()) / count for total in sums)],
            "gradients": gradients, "expected": dict(zip(params, expected, strict=True)), "rows": rows,
        })  # fmt: skip
        training.engine.close()
    return results


def assert_right(step: dict[str, Any]) -> None:
    assert step["actual"] == pytest.approx(step["reference"], rel=1e-5) and step["reference"][1] > 0.05
    assert step["gradients"].keys() == step["expected"].keys()
    for name, gradient in step["expected"].items():
        actual, scale = step["gradients"][name].view_as(gradient), float(gradient.abs().max())
        torch.testing.assert_close(actual, gradient.double(), rtol=0, atol=2e-5 * scale + 1e-9, msg=str(name))


@pytest.mark.parametrize(("engine", "losses"), [("native", [*LOSSES]), ("deepspeed", ["jsd"])])
def test_the_gradient_is_that_of_all_logits(engine: str, losses: list[str], teacher: str) -> None:
    unclipped = {"engine": engine, "gradient_clipping": 0.0}
    runs = [student(teacher, unclipped, **LOSSES[loss]) for loss in losses]
    for step in run_ranks(first_steps, 1, [*runs, student(teacher, unclipped, LABELLED, beta=0.5)])[0]:
        assert_right(step)


@pytest.mark.parametrize("case", ["deepseek 3", "qwen 3 next"])
def test_mixers_are_those_of_the_teacher(case: str, tmp_path: Path) -> None:
    """A student with usual attention learns from other mixers."""
    [step] = run_ranks(first_steps, 1, [student(hf_folder(case, tmp_path), {"gradient_clipping": 0.0})])[0]
    assert_right(step)


def test_one_of_huggingface_gives_transformers_logits(hf_teacher: str) -> None:
    [step] = run_ranks(first_steps, 1, [student(hf_teacher, {"gradient_clipping": 0.0})])[0]
    assert_right(step)
    assert step["rows"] == 381
    layouts = [student(hf_teacher, LAYOUTS[name]) for name in ("tp2 sp", "pp2")]
    losses = [part.losses for part in run_ranks(curves, 2, layouts, 1)[0]]
    assert losses == [pytest.approx(step["reference"][:1], rel=1e-5)] * 2
