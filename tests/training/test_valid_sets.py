"""Named validation sets (`valid_sets`): losses of their own, and of all their tokens together."""

from pathlib import Path
from typing import Any

import pytest

from tests.pool import run_ranks
from tests.training.runs import GOLDEN, LLAMA, TABLE, cells, config, metric_rows, output_of_run
from tests.training.test_labels_train import LABELS, SFT, TEXT

A, B = (str(GOLDEN / "dataset" / f"corpus{name}_text_document") for name in "AB")
BLEND: dict[str, Any] = {
    "data_path": None, "train_data_paths": [A, B], "train_micro_batch_size_per_gpu": 2, "train_iters": 2,
    "eval_iters": 2, "eval_interval": 2,
}  # fmt: skip

SETS = {"web": A, "books": [B, B]}


@pytest.mark.parametrize("name", cells(["dp2"], ["pp2", "tp2", "zero3, deepspeed"]))
def test_each_named_set_has_its_own_loss(name: str, tmp_path: Path) -> None:
    """A set has the loss that it has as `valid_data_paths`; without those, all tokens are the validation."""
    ranks, layout = TABLE[name]
    named_values = config(LLAMA, BLEND, layout, valid_sets=SETS, log_dir=str(tmp_path / "named/logs"))
    plain_values = config(
        LLAMA, BLEND, layout, valid_data_paths=[A], valid_sets={"books": [B, B]}, log_dir=str(tmp_path / "b/logs")
    )
    output = run_ranks(output_of_run, ranks, named_values, True)[0]
    run_ranks(output_of_run, ranks, plain_values, True)
    rows = metric_rows(tmp_path / "named", "validation/web/lm_loss")
    for row, plain_row in zip(rows, metric_rows(tmp_path / "b", "validation/lm_loss"), strict=True):
        assert plain_row["validation/lm_loss"] == row["validation/web/lm_loss"] != row["validation/books/lm_loss"]
        assert plain_row["validation/books/lm_loss"] == row["validation/books/lm_loss"]
        mean = row["validation/lm_loss"]
        assert min(losses := (row["validation/web/lm_loss"], row["validation/books/lm_loss"])) < mean < max(losses)
    assert "validation/web results at iteration" in output and "validation results at iteration" in output


def test_a_resumed_run_validates_on_the_same_samples(tmp_path: Path) -> None:
    """Also after the run was made longer; other sets are refused."""
    values = config(LLAMA, BLEND, eval_interval=1, valid_sets=SETS, checkpoint_factor=1)
    unbroken, resumed = ({**values, "save": str(tmp_path / name)} for name in ("unbroken", "resumed"))
    run_ranks(output_of_run, 1, unbroken, True)
    run_ranks(output_of_run, 1, {**resumed, "train_iters": 1}, True)
    with pytest.raises(AssertionError, match="valid_sets.*3 sets.*allow_changed_data"):
        run_ranks(output_of_run, 1, {**resumed, "valid_sets": {"web": A}})
    run_ranks(output_of_run, 1, resumed, True)
    rows = [metric_rows(tmp_path / name, "validation/web/lm_loss")[-1] for name in ("unbroken", "resumed")]
    unbroken_values, values = ({name: row[name] for name in row if name.startswith("validation/")} for row in rows)
    assert rows[0]["iteration"] == rows[1]["iteration"] == 2 and values == unbroken_values and len(values) == 9


@pytest.mark.parametrize("packing", cells(["best_fit"], ["unpacked", "packed"]))
def test_labels_of_a_set_decide_what_counts(packing: str, tmp_path: Path) -> None:
    values = config(
        LLAMA, SFT, valid_sets={"chat": [TEXT], "whole": TEXT}, valid_set_labels={"chat": LABELS[0]}, eval_iters=2,
        pack_impl=packing, train_iters=1, log_dir=str(tmp_path / "logs"),
    )  # fmt: skip
    run_ranks(output_of_run, 1, values, True)
    row = metric_rows(tmp_path, "validation/chat/lm_loss")[-1]
    assert row["validation/chat/lm_loss"] == row["validation/lm_loss"] != row["validation/whole/lm_loss"]


def test_the_mean_of_sets_counts_tokens(tmp_path: Path) -> None:
    """Fewer tokens count in the set that has labels."""
    sets = {"chat": [TEXT], "plain": TEXT}
    values = config(
        LLAMA, SFT, valid_sets=sets, valid_set_labels={"chat": LABELS[0]}, eval_iters=2, train_iters=1,
        valid_data_paths=None, valid_label_data_paths=None, log_dir=str(tmp_path / "logs"),
    )  # fmt: skip
    run_ranks(output_of_run, 1, values, True)
    row = metric_rows(tmp_path, "validation/chat/lm_loss")[-1]
    mean, chat_loss, plain_loss = (row[f"validation/{name}lm_loss"] for name in ("", "chat/", "plain/"))
    assert min(chat_loss, plain_loss) < mean < max(chat_loss, plain_loss)
    assert abs(mean - plain_loss) < 0.9 * abs(mean - chat_loss)
