"""What a run leaves to be read: every logged step once, and a summary that says what the run was."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.training.callbacks.history import history, training_time
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.callbacks.test_stopping import run_with_signal
from tests.training.runs import LAYOUTS, NEOX, config, run_to_end

NUMBER, TEXT = (int, float), (str,)
SCHEMA: dict[str, Any] = {
    "status": TEXT, "reason": (str, type(None)), "run_id": TEXT, "wall_clock_seconds": NUMBER,
    "world_size": (int,), "precision": TEXT, "objective": TEXT,
    "layout": dict.fromkeys(("tensor", "pipe", "context", "data", "zero_stage"), (int,)),
    "effective_batch": dict.fromkeys(
        ("samples", "rows", "tokens", "micro_batch", "gradient_accumulation_steps"), (int,)
    ),
    "learning_rate": {"given": NUMBER, "lr_scaling": TEXT, "effective": NUMBER, "least": NUMBER, "last": NUMBER},
    "parameters": {"total": (int,), "trainable": (int,), "trainable_share": NUMBER},
    "iteration": (int,), "train_iters": (int,), "skipped_steps": (int,),
    "consumed_samples": (int,), "consumed_tokens": (int,), "training_seconds": NUMBER, "tokens_per_sec": NUMBER,
    "best": (type(None),), "final": {"train/lm_loss": NUMBER, "validation/lm_loss": NUMBER},
    "start_weights": (type(None),), "versions": dict.fromkeys(("python", "torch", "deepspeed"), TEXT),
    "git_hash": (str, type(None)),
}  # fmt: skip


def check(found: Any, schema: Any, where: str = "") -> None:
    """The same keys, each of its type."""
    if isinstance(schema, tuple):
        assert isinstance(found, schema) and not isinstance(found, bool), f"{where}: {found!r}"
        return
    assert found.keys() == schema.keys(), where
    for name, inner in schema.items():
        check(found[name], inner, f"{where}.{name}")


def given(save: Path, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {
        "num_layers": 2, "train_micro_batch_size_per_gpu": 2, "train_iters": 6, "checkpoint_factor": 100,
        "eval_interval": 2, "eval_iters": 1, "save": str(save), "load": str(save), "log_param_norm": True,
        "trainable": {"last_layers": 1, "head": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "lr_scaling": "linear",
    }  # fmt: skip
    return config(NEOX, common, *parts, **more)


def read(save: Path, name: str) -> Any:
    return json.loads((save / f"training_{name}.json").read_text())


@pytest.mark.parametrize("layout", with_more(["pp2", "zero1"], product=["zero1"]))
def test_a_run_that_was_stopped_and_went_on(layout: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    run_ranks(run_with_signal, ranks, given(tmp_path, keys), signal.SIGTERM, 2, 0)
    stopped = read(tmp_path, "summary")
    assert (stopped["status"], stopped["reason"], stopped["iteration"]) == ("stopped", "signal SIGTERM", 3)
    assert [record["iteration"] for record in read(tmp_path, "history")] == [0, 1, 2, 3]
    run_ranks(run_to_end, ranks, given(tmp_path, keys))
    records, summary = read(tmp_path, "history"), read(tmp_path, "summary")
    assert [record["iteration"] for record in records] == list(range(7)), "each step once"
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    for record, row in zip(records, rows, strict=True):
        share = record.pop("trainable_share")
        assert record == {k: v for k, v in row.items() if k != "run_id" and not k.startswith("parameter_norms/")}
        assert share == summary["parameters"]["trainable_share"]
    wanted = {"train/lm_loss", "validation/lm_loss", "train/learning_rate", "train/grad_norm", "runtime/tokens_per_sec"}
    assert wanted <= records[6].keys()
    check(summary, SCHEMA)
    assert summary["status"] == "finished" and summary["run_id"] == stopped["run_id"]
    data = 1 if layout == "pp2" else 2
    assert summary["layout"] == {
        "tensor": 1, "pipe": 2 // data, "context": 1, "data": data, "zero_stage": 1
    }  # fmt: skip
    assert summary["effective_batch"]["tokens"] == 8 * 32 and summary["consumed_tokens"] == 6 * 8 * 32
    assert summary["learning_rate"]["effective"] == 1e-3 * data == summary["learning_rate"]["last"]
    assert 0 < summary["parameters"]["trainable"] < summary["parameters"]["total"]
    assert summary["final"]["validation/lm_loss"] == rows[6]["validation/lm_loss"]
    seconds = sum(row["runtime/iteration_time"] for row in rows[1:])
    assert math.isclose(summary["training_seconds"], seconds)
    assert math.isclose(summary["tokens_per_sec"], 6 * 8 * 32 / seconds, rel_tol=1e-6)


def test_history_of_rows() -> None:
    rows = [
        {"iteration": 0, "run_id": "a", "validation/lm_loss": 3.0},
        {"iteration": 4, "run_id": "a", "train/grad_norm": math.nan, "device/memory_gib_max": 2.5,
         "weight_norms/x": 1.0, "runtime/iteration_time": 0.5, "runtime/tokens_per_sec": 100.0},
        {"iteration": 5, "run_id": "a", "runtime/iteration_time": 2.0, "runtime/tokens_per_sec": 25.0},
    ]  # fmt: skip
    first, second, _ = history(rows, 0.25)
    assert first == {"iteration": 0, "validation/lm_loss": 3.0, "trainable_share": 0.25}
    assert second["train/grad_norm"] is None and second["device/memory_gib_max"] == 2.5
    assert "weight_norms/x" not in second
    assert training_time(rows) == (4 * 0.5 + 2.0, 4 * 0.5 * 100 + 2.0 * 25)
