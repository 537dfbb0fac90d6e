"""The log line is upstream's, byte for byte; metrics.jsonl and TensorBoard hold the same numbers once."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.callbacks import Step, StepResult
from megatron.neox_arguments import NeoXArgs
from megatron.process import metrics_file
from megatron.process.metrics_file import JsonlLogger, read_metrics, read_metrics_backwards
from megatron.training.callbacks.log import LogCallback
from megatron.training.loop_state import Stopwatch
from megatron.training.metrics.flops import neox_flops, readable_flops
from megatron.training.metrics.loggers import TolerantTracker
from tests.pool import run_ranks
from tests.training.runs import NEOX, config, run_to_end


def upstream_line(
    samples: float, iteration: int, total: int, ms: float, lr: float, flops: str, loss: float, skipped: int, nan: int,
    utilization: tuple[float, float] | None = None, scale: float | None = None,
) -> str:  # fmt: skip
    """The line's format as the reference states it."""
    text = f" samples/sec: {samples:.3f} | iteration {iteration:8d}/{total:8d} |"
    text += f" elapsed time per iteration (ms): {ms:.1f} |"
    text += f" learning rate: {lr:.3E} | approx flops per GPU: {flops} |"
    if utilization:
        text += " MFU: {:.2f}% | HFU: {:.2f}% |".format(*utilization)
    text += f" lm_loss: {loss:.6E} |"
    if scale is not None:
        text += f" loss scale: {scale:.1f} |"
    return text + f" number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |"


class Clock(Stopwatch):
    """Two seconds an interval."""

    def lap(self) -> float:
        return 2.0


@pytest.mark.parametrize("scale", [None, 65536.0])
@pytest.mark.parametrize("peak", [None, 1e-6])
def test_line(scale: float | None, peak: float | None) -> None:
    args = NeoXArgs.from_dict(config(NEOX, log_interval=2, padded_vocab_size=384, peak_theoretical_tflops=peak))
    lines: list[str] = []
    training: Any = SimpleNamespace(
        args=args,
        groups=SimpleNamespace(world_rank=0, world_size=1, device=torch.device("cpu")),
        schedule=lambda step: 1e-4 * step,
        logger=SimpleNamespace(info=lines.append),
        watchdog=SimpleNamespace(restarts=0),
    )
    bar: Any = __import__("tqdm").tqdm(disable=True)
    log = LogCallback(training, bar, Clock())
    for i, loss in ((1, 3.0), (2, 5.0), (3, 4.0), (4, 8.0)):
        log.on_step_end(
            training, step := Step(i, 8 * i, 32, StepResult(torch.tensor(loss), 1.5, i == 3, loss_scale=scale))
        )
    log.settle()
    flops = neox_flops(args, 3)
    share = (100 * flops / (peak * 1e12),) * 2 if peak else None
    common = {"utilization": share, "scale": scale}
    assert lines == [
        upstream_line(8.0, 2, 10, 1000.0, 2e-4, readable_flops(flops), 4.0, 0, 0, **common),  # type: ignore[arg-type]
        upstream_line(8.0, 4, 10, 1000.0, 4e-4, readable_flops(flops), 8.0, 1, 0, **common),  # type: ignore[arg-type]
    ]
    assert step.row["train/lm_loss"] == 8.0 and step.row["train/grad_norm"] == 1.5
    assert step.row["consumed_tokens"] == 1024


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0"), (999.9, "999.9"), (1234.5, "1.2KFLOPS"), (4.78e14, "478.0TFLOPS")]
)
def test_readable_flops(value: float, text: str) -> None:
    assert readable_flops(value) == text


def test_flops_by_hand() -> None:
    """24 f B s L h^2 (1 + s/6h + V/16Lh)."""
    args = NeoXArgs.from_dict(config(NEOX, padded_vocab_size=384))
    by_hand = 24 * 3 * 8 * 32 * 4 * 32**2 * (1 + 32 / (6 * 32) + 384 / (16 * 4 * 32))
    assert neox_flops(args, 3) == pytest.approx(by_hand, rel=1e-12)


def test_metrics_files_agree(tmp_path: Path) -> None:
    given = config(
        NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, save=str(tmp_path), checkpoint_factor=4, num_layers=2,
        tensorboard_dir=str(tmp_path / "tb"), eval_iters=1, eval_interval=2, split="80,15,5", log_interval=2,
    )  # fmt: skip
    run_ranks(run_to_end, 1, given)
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 2, 4]
    assert rows[1]["consumed_samples"] == 16 and rows[1]["consumed_tokens"] == 512
    assert "train/lm_loss" not in rows[0] and "test/lm_loss" not in rows[1]
    assert {"train/lm_loss", "validation/lm_loss", "test/lm_loss", "train/grad_norm"} <= rows[2].keys()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            row = next(row for row in rows if row["iteration"] == event.step)
            assert event.value == pytest.approx(row[name], rel=1e-6)
    assert set(events.Tags()["scalars"]) == {name for row in rows for name in row if "/" in name}


def test_time_of_a_step_is_without_saving(tmp_path: Path) -> None:
    """Also of steps that save, and of the steps after them."""
    given = config(NEOX, train_iters=8, train_micro_batch_size_per_gpu=4, save=str(tmp_path), checkpoint_factor=2)
    run_ranks(slow_steps, 1, given)
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    times = [row["runtime/iteration_time"] for row in rows[1:]]
    assert all(0.1 < seconds < 0.6 for seconds in times), times


def slow_steps(rank: int, world_size: int, given: dict[str, Any]) -> None:
    """For the pool: steps of a tenth of a second, saves of six."""
    import time

    from megatron.training import train
    from tests.training.runs import begin

    training = begin(given)
    train_step, save = training.engine.train_step, training.checkpointer.save
    training.engine.train_step = lambda *a: (time.sleep(0.1), train_step(*a))[1]  # type: ignore[method-assign]
    training.checkpointer.save = lambda *a, **more: (time.sleep(0.6), save(*a, **more))[1]  # type: ignore[method-assign]
    train(training)


def test_rows_after_the_restored_step_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"iteration": {i}, "run_id": "a"}}\n' for i in range(6)) + '{"iteration": 6, "trai')
    log = JsonlLogger(path, 3, "a")
    log.write({"iteration": 4, "train/lm_loss": 1.0})
    log.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_damaged_bytes_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no row is no reason not to go on."""
    path = tmp_path / "metrics.jsonl"
    rows = [f'{{"iteration": {i}, "run_id": "a"}}\n'.encode() for i in range(4)]
    damaged = b'{"iteration": 1, "note": "\xff\xfe", "run_id": "b"}\n\x00\x80\n'
    path.write_bytes(rows[0] + rows[1] + damaged + rows[2] + rows[3])
    log = JsonlLogger(path, 2, "a")
    log.write({"iteration": 3, "train/lm_loss": 1.0})
    log.close()
    assert path.read_bytes().startswith(rows[0] + rows[1] + damaged + rows[2] + b'{"iteration": 3, "train/lm_loss"')
    assert [row["iteration"] for _, row in read_metrics(path)] == [0, 1, 2, 3]
    for block in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(metrics_file, "_BLOCK", block)
        assert list(read_metrics_backwards(path)) == list(read_metrics(path))[::-1]


def test_a_tracker_that_cannot_write_is_said_once() -> None:
    def fails(*row: Any) -> None:
        raise OSError(28, "No space left on device")

    messages: list[str] = []
    tracker = TolerantTracker(SimpleNamespace(write=fails, close=fails), messages.append)
    tracker.write({})
    tracker.write({})
    tracker.close()
    assert messages == ["SimpleNamespace: rows are lost (No space left on device); the run goes on"]


def test_metrics_of_another_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for run in ("a", "b", "c"):
        log = JsonlLogger(path, 0, run)
        log.write({"iteration": 1, "train/lm_loss": 1.0})
        log.close()
    kept = [json.loads((tmp_path / name).read_text())["run_id"] for name in ("metrics.1.jsonl", "metrics.2.jsonl")]
    assert kept == ["a", "b"] and json.loads(path.read_text())["run_id"] == "c"


def test_logger_is_quiet_on_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.distributed import configure_logging

    try:
        configure_logging(1).info("rank one")
        configure_logging(0).info("rank zero")
    finally:
        logging.getLogger("megatron").handlers = []
    assert capsys.readouterr().out == "rank zero\n"


def wandb_calls(rank: int, world_size: int, given: dict[str, Any]) -> list[Any]:
    """For the pool: what a run says to Weights & Biases, which is not installed here."""
    import sys

    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda row, step: calls.append((step, sorted(row))), finish=lambda: calls.append("finish")
    )

    def init(**kwargs: Any) -> Any:
        calls.append({key: kwargs[key] for key in ("id", "resume", "project", "group")})
        return run

    sys.modules["wandb"] = SimpleNamespace(init=init, Settings=lambda **kwargs: kwargs)  # type: ignore[assignment]
    run_to_end(rank, world_size, given)
    return calls


def test_wandb_goes_on_in_the_same_run(tmp_path: Path) -> None:
    given = config(
        NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, save=str(tmp_path), checkpoint_factor=2, num_layers=2,
        use_wandb=True, wandb_project="p", wandb_group="g", exit_interval=2,
    )  # fmt: skip
    first, second = (run_ranks(wandb_calls, 1, given)[0] for _ in range(2))
    assert first[0] == second[0], "one id before and after the restart"
    assert {k: v for k, v in first[0].items() if k != "id"} == {"resume": "allow", "project": "p", "group": "g"}
    assert [call[0] for call in first[1:-1]] == [1, 2] and [call[0] for call in second[1:-1]] == [3, 4]
    assert "train/lm_loss" in first[1][1] and first[-1] == second[-1] == "finish"


def test_metrics_of_an_objective() -> None:
    """Means over the steps of a line, in the line and in the row; what was never counted is left out."""
    args = NeoXArgs.from_dict(config(NEOX, log_interval=3, padded_vocab_size=384))
    lines: list[str] = []
    training: Any = SimpleNamespace(
        args=args,
        groups=SimpleNamespace(world_rank=0, world_size=1, device=torch.device("cpu")),
        schedule=lambda step: 1e-4 * step,
        logger=SimpleNamespace(info=lines.append),
        watchdog=SimpleNamespace(restarts=0),
    )
    bar: Any = __import__("tqdm").tqdm(disable=True)
    log = LogCallback(training, bar, Clock())
    nan = float("nan")
    for i, accuracy, kl in ((1, 0.5, nan), (2, nan, nan), (3, 1.0, nan)):
        metrics = {"rewards/accuracies": torch.tensor(accuracy), "kl": torch.tensor(kl)}
        log.on_step_end(
            training, step := Step(i, 8 * i, 32, StepResult(torch.tensor(2.0), 1.5, False, metrics=metrics))
        )
    log.settle()
    assert " lm_loss: 2.000000E+00 | rewards/accuracies: 7.500000E-01 | number of skipped" in lines[0]
    assert step.row["train/rewards/accuracies"] == 0.75 and "train/kl" not in step.row
