"""Runs that learn from a teacher: in every layout beside one process, and which teachers they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.methods.distillation.runs import DOCUMENTS, LABELLED, LAYOUTS, TOKENIZER, student
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_refused
from tests.training.runs import Curve, assert_alike, cells, curves, curves_of, metric_rows, run_to_end

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forward": (DOCUMENTS, {"weight": 0.7}),
    "jsd": (LABELLED, {"beta": 0.3, "temperature": 2.0}),
    "top": ({}, {"beta": 1.0, "top_k": 8}),
}
DEFAULT_CELLS = [
    ("tp2 sp", "forward"),
    ("tp2 sp", "top"),
    ("pp2", "jsd"),
    ("zero3", "top"),
    ("zero1, deepspeed", "jsd"),
]
FOUR_RANK_LAYOUTS = {"tp2, pp2": {"model_parallel_size": 2, "pipe_parallel_size": 2}}
CASES = cells([(2, DEFAULT_CELLS)], [(4, [("tp2, pp2", "forward"), ("tp2, pp2", "top")])],
              [(2, [(name, kind) for name in LAYOUTS]) for kind in KINDS])  # fmt: skip
STEPS = 3


def student_of_kind(kind: str, teacher: str, layout: dict[str, Any]) -> dict[str, Any]:
    parts, keys = KINDS[kind]
    return student(teacher, parts, layout, **keys)


@pytest.fixture(scope="module")
def one_process(teacher: str) -> dict[str, Curve]:
    return curves_of({kind: student_of_kind(kind, teacher, {}) for kind in KINDS}, STEPS)


@pytest.mark.parametrize(("ranks", "runs"), CASES)
def test_layouts_equal_one_process(
    ranks: int, runs: list[tuple[str, str]], one_process: dict[str, Curve], teacher: str
) -> None:
    run_values = {run: student_of_kind(run[1], teacher, {**LAYOUTS, **FOUR_RANK_LAYOUTS}[run[0]]) for run in runs}
    assert_alike(curves_of(run_values, STEPS, ranks), {run: one_process[run[1]] for run in runs})


def test_the_divergence_falls_and_rows_say_so(tmp_path: Path, teacher: str) -> None:
    learns = {"train_iters": 12, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "checkpoint_factor": 12}
    validates = {"eval_iters": 2, "eval_interval": 12, "save_best": "validation/divergence:min", "save": str(tmp_path)}
    run_ranks(run_to_end, 1, student(teacher, learns, validates, temperature=2.0))
    rows = metric_rows(tmp_path, "train/divergence")
    divergences = [row["train/divergence"] for row in rows]
    assert len(rows) == 12 and divergences == pytest.approx([row["train/lm_loss"] for row in rows])
    [validated] = [row["validation/divergence"] for row in rows if "validation/divergence" in row]
    assert max(validated, *divergences[-3:]) < divergences[0] / 2 and rows[-1]["train/nll"] < rows[0]["train/nll"]


def test_adapters_of_a_student_learn_from_its_teacher(teacher: str) -> None:
    values = student(teacher, {"lora": {"r": 4}, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}})
    frozen = {**values, "optimizer": {"type": "Adam", "params": {"lr": 0.0}}}
    learned, control = (part.losses[-1] for part in run_ranks(curves, 1, [values, frozen], 4)[0])
    assert learned < control


def test_what_cannot_be_a_teacher_is_named(teacher: str, hf_teacher: str, tmp_path: Path) -> None:
    other_tokenizer = tmp_path / "other"
    shutil.copytree(hf_teacher, other_tokenizer)
    content = json.loads(TOKENIZER.read_text())
    content["model"]["vocab"] = {word: number for number, word in enumerate(reversed(content["model"]["vocab"]))}
    (other_tokenizer / "tokenizer.json").write_text(json.dumps(content))
    no_tokenizer = tmp_path / "without"
    shutil.copytree(hf_teacher, no_tokenizer)
    (no_tokenizer / "tokenizer.json").unlink()
    longer, key = {"seq_length": 128, "max_position_embeddings": 128}, "distillation.teacher"
    assert_refused(
        (student(str(tmp_path / "nowhere")), f"{key}.*nowhere: no such"),
        (student(str(other_tokenizer)), f"{key}.*other.*another tokenizer"),
        (student(str(no_tokenizer)), f"{key}.*without.*tokenizer.json"),
        (student(teacher, longer), f"{key}.* 64 .*seq_length .*128"),
        (student(teacher, {"padded_vocab_size": 512}), "vocabulary.* padded"),
        (student(hf_teacher, {"mask_padded_vocab": 383}), "mask_padded_vocab: .*383 .* 381"),
        (
            student(teacher, {"vocab_file": str(other_tokenizer / "tokenizer.json")}),
            f"{key}.*{teacher}.*another tokenizer",
        ),
    )
