"""Which teachers a run takes, and what it says of those that it does not; one of HuggingFace beside
transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.loop import batches_of
from tests.checkpointing.family_models import random_model
from tests.mpu.test_distillation import generalized_jsd
from tests.pool import run_ranks
from tests.training.distillation.runs import student
from tests.training.distillation.test_gradients import logits
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


def test_two_tensor_ranks_learn_alike_from_one_of_huggingface(hf_teacher: str) -> None:
    layouts: list[dict[str, Any]] = [{}, {"model_parallel_size": 2}, {"pipe_parallel_size": 2}]
    one, *others = (
        run_ranks(curves, 1 + bool(layout), [student(hf_teacher, layout)], 3)[0][0].losses for layout in layouts
    )
    assert all(found == pytest.approx(one, rel=1e-5) for found in others)


def test_adapters_of_a_student_learn_from_its_teacher(teacher: str) -> None:
    values = student(teacher, {"lora": {"r": 4}, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}})
    losses = run_ranks(curves, 1, [values], 5)[0][0].losses
    assert losses[-1] < losses[0]


def begins(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a run up to its first step."""
    begin(values).engine.close()


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
    cases: list[tuple[dict[str, Any], str]] = [
        (student(str(tmp_path / "nowhere")), "distillation.teacher: .*nowhere: no such directory"),
        (student(str(other)), "distillation.teacher: .* trained with another tokenizer"),
        (student(str(without)), "has no tokenizer"),
        (student(teacher, longer), "distillation.teacher: .* reads 64 tokens, but seq_length is 128"),
        (student(teacher, {"padded_vocab_size": 512}), "the vocabulary is padded differently"),
        (student(hf_teacher, {"mask_padded_vocab": 383}), "mask_padded_vocab: 383 rows .* knows 381"),
        (student(teacher, {"vocab_file": str(other / "tokenizer.json")}), "distillation.teacher: .*another tokenizer"),
    ]  # fmt: skip
    for values, message in cases:
        with pytest.raises(AssertionError, match=message):
            run_ranks(begins, 1, values)
