"""Which teachers a run takes, and what it says of those that it does not; one of HuggingFace beside
transformers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.loop import batches_of
from tests.checkpointing.family_models import random_model
from tests.mpu.test_distillation import generalized_jsd
from tests.pool import run_ranks
from tests.training.distillation.runs import LAYOUTS, student
from tests.training.distillation.test_gradients import logits
from tests.training.native.in_turn import refusals
from tests.training.runs import BASE, begin, curves

TOKENIZER = Path(BASE["vocab_file"])


@pytest.fixture(scope="module")
def hf_teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hf")
    random_model("llama 3", torch.float32, vocab_size=381).save_pretrained(folder)  # no multiple of anything
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    return str(folder)


def of_transformers(rank: int, world_size: int, values: dict[str, Any]) -> tuple[float, float, int]:
    """For the pool: the divergence of a first step, the same from transformers' logits, and the rows of
    vocabulary that take part."""
    from transformers import AutoModelForCausalLM

    training = begin(values)
    step = next(batches_of(training))
    ours = float(training.engine.train_step(list(step), 0.0).metrics["divergence"])
    model = AutoModelForCausalLM.from_pretrained(values["distillation"]["teacher"], dtype=torch.float32)
    total, count, rows = 0.0, 0, training.args.softmax_rows or 0
    with torch.no_grad():
        for batch in step:
            trained = batch.loss_weights > 0
            others = model(batch.tokens).logits.double()[trained]
            own = logits(training.engine.stage, batch)[trained]
            total += float(generalized_jsd(own[:, :rows], others[:, :rows], 0.0, 1.0).sum())
            count += int(trained.sum())
    return ours, total / count, rows


def test_one_of_huggingface_gives_transformers_logits(hf_teacher: str) -> None:
    ours, theirs, rows = run_ranks(of_transformers, 1, student(hf_teacher))[0]
    assert ours == pytest.approx(theirs, rel=1e-5) and rows == 381
    layouts = [student(hf_teacher, LAYOUTS[name]) for name in ("tp2, sp", "pp2")]
    assert [part.losses for part in run_ranks(curves, 2, layouts, 1)[0]] == [pytest.approx([theirs], rel=1e-5)] * 2


def test_adapters_of_a_student_learn_from_its_teacher(teacher: str) -> None:
    values = student(teacher, {"lora": {"r": 4}, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}})
    still = {**values, "optimizer": {"type": "Adam", "params": {"lr": 0.0}}}
    learned, control = (part.losses[-1] for part in run_ranks(curves, 1, [values, still], 4)[0])
    assert learned < control


def test_what_cannot_be_a_teacher_is_named(teacher: str, hf_teacher: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(hf_teacher, other)
    content = json.loads(TOKENIZER.read_text())
    content["model"]["vocab"] = {word: number for number, word in enumerate(reversed(content["model"]["vocab"]))}
    (other / "tokenizer.json").write_text(json.dumps(content))
    without = tmp_path / "without"
    shutil.copytree(hf_teacher, without)
    (without / "tokenizer.json").unlink()
    longer = {"seq_length": 128, "max_position_embeddings": 128}
    key = "distillation.teacher"
    cases: list[tuple[dict[str, Any], str]] = [
        (student(str(tmp_path / "nowhere")), f"{key}.*nowhere: no such"),
        (student(str(other)), f"{key}.*other.*another tokenizer"),
        (student(str(without)), f"{key}.*without.* no tokenizer"),
        (student(teacher, longer), f"{key}.* 64 .*seq_length .*128"),
        (student(teacher, {"padded_vocab_size": 512}), "vocabulary.* padded"),
        (student(hf_teacher, {"mask_padded_vocab": 383}), "mask_padded_vocab: 383 .* 381"),
        (student(teacher, {"vocab_file": str(other / "tokenizer.json")}), f"{key}.*{teacher}.*another tokenizer"),
    ]
    found = run_ranks(refusals, 1, [values for values, _ in cases])[0]
    for text, (_, facts) in zip(found, cases, strict=True):
        assert re.search(facts, text), text
