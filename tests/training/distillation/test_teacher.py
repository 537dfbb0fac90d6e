"""Which teachers a run takes, and what it says of those that it does not."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.pool import run_ranks
from tests.training.distillation.runs import TOKENIZER, student
from tests.training.native.in_turn import refusals
from tests.training.runs import curves


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
