"""Files that a run writes: upstream's log line, metrics, history, summary and router load."""

import json
import logging
import math
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import megatron.training.run
from megatron.callbacks import Step, StepResult
from megatron.distributed import configure_logging
from megatron.model.moe import RoutingCounts
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process import metrics_file
from megatron.process.metrics_file import JsonlLogger, read_lines, read_lines_backwards
from megatron.process.run_files import Problems
from megatron.training import train
from megatron.training.builtin_callbacks import router_load
from megatron.training.builtin_callbacks.history import history, training_time
from megatron.training.builtin_callbacks.log import LogCallback
from megatron.training.builtin_callbacks.router_load import MOST_LINES, RouterLoad, interval
from megatron.training.method import find_method
from megatron.training.metrics.flops import neox_flops, readable_flops
from megatron.training.metrics.loggers import TolerantTracker
from megatron.training.run import LoopState, Stopwatch
from tests.pool import run_ranks
from tests.training.callbacks.test_stopping import run_with_signal
from tests.training.checkpoint.test_resume import metrics
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, NEOX, before_steps, begin, cells, config, run_to_end


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


def logged(args: NeoXArgs, results: list[StepResult]) -> tuple[list[str], dict[str, Any]]:
    """The lines of a log of steps with these results, and the last row."""
    lines: list[str] = []
    training: Any = SimpleNamespace(args=args, groups=ParallelGroups.single(), iteration=0,
                                    schedule=lambda step: 1e-4 * step,
                                    logger=SimpleNamespace(info=lines.append), method=find_method(args),
                                    watchdog=SimpleNamespace(restarts=0))  # fmt: skip
    clock = Mock(Stopwatch, lap=lambda: 2.0)  # seconds of an interval
    training.loop = LoopState(stopwatch=clock)
    log = LogCallback(training)
    for i, result in enumerate(results, 1):
        log.on_step_end(training, step := Step(i, 8 * i, 32, result))
    log.settle()
    return lines, step.row


@pytest.mark.parametrize("scale", [None, 65536.0])
@pytest.mark.parametrize("peak", [None, 1e-6])
def test_line(scale: float | None, peak: float | None) -> None:
    args = NeoXArgs.from_dict(config(NEOX, log_interval=2, padded_vocab_size=384, peak_theoretical_tflops=peak))
    losses, flops = {1: 3.0, 2: 5.0, 3: 4.0, 4: 8.0}, neox_flops(args, 3)
    results = [StepResult(torch.tensor(loss), 1.5, i == 3, loss_scale=scale) for i, loss in losses.items()]
    lines, row = logged(args, results)
    share = (100 * flops / (peak * 1e12),) * 2 if peak else None
    assert lines == [
        upstream_line(8.0, step, 10, 1000.0, 1e-4 * step, readable_flops(flops), loss, skipped, 0, share, scale)
        for step, loss, skipped in ((2, 4.0, 0), (4, 8.0, 1))
    ]
    assert (
        row["train/lm_loss"] == 8.0
        and row["train/skipped_steps"] == 1
        and row["train/grad_norm"] == 1.5
        and row["consumed_tokens"] == 1024
    )


def test_the_row_has_the_mean_of_the_line_and_counts_what_it_left_out() -> None:
    """A step without a trained token is neither skipped nor NaN; one that was not finite is both."""
    args, nan = NeoXArgs.from_dict(config(NEOX, log_interval=3, padded_vocab_size=384)), torch.tensor(math.nan)
    usual = [StepResult(torch.tensor(loss), 1.5, False) for loss in (3.0, 5.0)]
    untrained, broken = StepResult(nan, nan, True, untrained=True), StepResult(nan, nan, True)
    lines, row = logged(args, [*usual, untrained])
    assert " lm_loss: 4.000000E+00 |" in lines[0] and row["train/lm_loss"] == 4.0
    assert (row["train/skipped_steps"], row["train/untrained_steps"]) == (0, 1)
    lines, row = logged(args, [untrained] * 3)
    assert " lm_loss: untrained |" in lines[0] and f"number of nan iterations: {0:3d} |" in lines[0]
    assert f"number of untrained iterations: {3:3d} |" in lines[0] and math.isnan(row["train/lm_loss"])
    lines, row = logged(args, [untrained, broken, broken])
    assert " lm_loss: NAN |" in lines[0] and f"number of nan iterations: {1:3d} |" in lines[0]
    assert (row["train/skipped_steps"], row["train/untrained_steps"]) == (2, 1)


def test_readable_flops() -> None:
    texts = {0.0: "0.0", 999.9: "999.9", 1234.5: "1.2KFLOPS", 4.78e14: "478.0TFLOPS"}
    assert {value: readable_flops(value) for value in texts} == texts


def test_metrics_files_agree(tmp_path: Path) -> None:
    values = config(NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, save=str(tmp_path), checkpoint_factor=4,
                   num_layers=2, tensorboard_dir=str(tmp_path / "tb"), eval_iters=1, eval_interval=2, split="80,15,5",
                   log_interval=2)  # fmt: skip
    run_ranks(run_to_end, 1, values)
    rows = metrics(tmp_path)
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
    values = config(NEOX, train_iters=8, train_micro_batch_size_per_gpu=4, save=str(tmp_path), checkpoint_factor=2)
    run_ranks(run_by_a_clock, 1, values)
    assert [row["runtime/iteration_time"] for row in metrics(tmp_path)] == [1.0] * 8
    assert not (tmp_path / "logs" / "router_load.jsonl").exists(), "a dense model has none"


def run_by_a_clock(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: by its clock a step takes a second, a save a hundred."""
    clock = [0.0]
    megatron.training.run.time = SimpleNamespace(perf_counter=lambda: sum(clock))  # type: ignore[assignment]
    training = begin(values)
    save = training.checkpointer.save

    def slow_save(*args: Any, **kwargs: Any) -> None:
        clock.append(100.0)
        save(*args, **kwargs)

    before_steps(training, lambda step: clock.append(1.0))
    training.checkpointer.save = slow_save  # type: ignore[method-assign]
    train(training)


def test_rows_after_the_restored_step_are_cut_and_damage_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [f'{{"iteration": {i}, "run_id": "a"}}\n'.encode() for i in range(5)]
    damaged = b'{"iteration": 1, "note": "\xff\xfe", "run_id": "b"}\n\x00\x80\n'
    path.write_bytes(b"".join([*rows[:2], damaged, *rows[2:], b'{"iteration": 5, "trai']))
    log = JsonlLogger(path, 2, "a")
    log.write({"iteration": 3, "train/lm_loss": 1.0})
    log.close()
    retained = b"".join([*rows[:2], damaged, rows[2]])
    assert path.read_bytes().startswith(retained + b'{"iteration": 3, "train/lm_loss"')
    assert [row["iteration"] for _, row in read_lines(path, Problems())] == [0, 1, 2, 3]
    for block in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(metrics_file, "_BLOCK", block)
        assert list(read_lines_backwards(path, Problems())) == list(read_lines(path, Problems()))[::-1]


def test_a_start_from_step_0_replaces_its_validation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        log = JsonlLogger(path, 0, "a")
        log.write({"iteration": 0, "validation/lm_loss": 1.0})
        log.close()
    assert len(path.read_text().splitlines()) == 1
    log = JsonlLogger(path, 5, "a")  # rows are written every ten steps
    log.close()
    assert len(path.read_text().splitlines()) == 1


def test_a_tracker_that_cannot_write_is_said_once() -> None:
    def fails(*row: Any) -> None:
        raise OSError(28, "No space left on device")

    messages: list[str] = []
    tracker = TolerantTracker(SimpleNamespace(write=fails, close=fails), messages.append)
    tracker.write({})
    tracker.write({})
    tracker.close()
    (message,) = messages
    assert "SimpleNamespace" in message and "No space left on device" in message


def test_metrics_of_another_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for run in ("a", "b", "c"):
        log = JsonlLogger(path, 0, run)
        log.write({"iteration": 1, "train/lm_loss": 1.0})
        log.close()
    backup_ids = [
        json.loads((tmp_path / name).read_text())["run_id"] for name in ("metrics.1.jsonl", "metrics.2.jsonl")
    ]
    assert backup_ids == ["a", "b"] and json.loads(path.read_text())["run_id"] == "c"


def test_logger_is_quiet_on_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        configure_logging(1).info("rank one")
        configure_logging(0).info("rank zero")
    finally:
        logging.getLogger("megatron").handlers = []
    assert capsys.readouterr().out == "rank zero\n"


def wandb_calls(rank: int, world_size: int, values: dict[str, Any]) -> tuple[dict[str, Any], dict[int, Any], str]:
    """For the pool: what a run says to Weights & Biases, which is not installed here."""
    tracker = sys.modules["wandb"] = Mock()
    run_to_end(rank, world_size, values)
    _, (_, _, init_keys), *logged, (last, _, _) = tracker.mock_calls
    rows = {log_keys["step"]: sorted(row) for _, (row,), log_keys in logged}
    return {key: init_keys[key] for key in ("id", "resume", "project", "group")}, rows, last


def test_wandb_goes_on_in_the_same_run(tmp_path: Path) -> None:
    values = config(NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, save=str(tmp_path), checkpoint_factor=2,
                   num_layers=2, use_wandb=True, wandb_project="p", wandb_group="g", exit_interval=2)  # fmt: skip
    (first_init, rows_before, last), (second_init, rows_after, _) = (
        run_ranks(wandb_calls, 1, values)[0] for _ in range(2)
    )
    assert first_init == second_init, "one id before and after the restart"
    assert first_init == {"id": first_init["id"], "resume": "allow", "project": "p", "group": "g"}
    assert (
        [*rows_before] == [1, 2]
        and [*rows_after] == [3, 4]
        and "train/lm_loss" in rows_before[1]
        and last == "init().finish"
    )


def test_metrics_of_an_objective() -> None:
    """Means over the steps of a line, in the line and in the row; what was never counted is left out."""
    args, nan = NeoXArgs.from_dict(config(NEOX, log_interval=3, padded_vocab_size=384)), math.nan
    means = [{"rewards/accuracies": torch.tensor(value), "kl": torch.tensor(nan)} for value in (0.5, nan, 1.0)]
    lines, row = logged(args, [StepResult(torch.tensor(2.0), 1.5, False, metrics=values) for values in means])
    assert " lm_loss: 2.000000E+00 | rewards/accuracies: 7.500000E-01 | number of skipped" in lines[0]
    assert row["train/rewards/accuracies"] == 0.75 and "train/kl" not in row


# -- history and summary -------------------------------------------------------------------------------------
NUMBER, TEXT = (int, float), (str,)
BATCH = ("samples", "rows", "tokens", "micro_batch", "gradient_accumulation_steps")
SCHEMA: dict[str, Any] = {
    "status": TEXT, "reason": (str, type(None)), "run_id": TEXT, "wall_clock_seconds": NUMBER,
    "world_size": (int,), "precision": TEXT, "objective": TEXT,
    "layout": dict.fromkeys(("tensor", "pipe", "context", "data", "zero_stage"), (int,)),
    "effective_batch": dict.fromkeys(BATCH, (int,)),
    "learning_rate": {"given": NUMBER, "lr_scaling": TEXT, "effective": NUMBER, "least": NUMBER, "last": NUMBER},
    "parameters": {"total": (int,), "trainable": (int,), "trainable_share": NUMBER},
    "iteration": (int,), "train_iters": (int,), "skipped_steps": (int,),
    "consumed_samples": (int,), "consumed_tokens": (int,), "training_seconds": NUMBER, "tokens_per_sec": NUMBER,
    "best": (type(None),), "final": {"train/lm_loss": NUMBER, "validation/lm_loss": NUMBER},
    "start_weights": (type(None),), "versions": dict.fromkeys(("python", "torch", "deepspeed"), TEXT),
    "git_hash": (str, type(None)),
}  # fmt: skip


def check(value: Any, schema: Any, path: str = "") -> None:
    if isinstance(schema, tuple):
        assert isinstance(value, schema) and not isinstance(value, bool), f"{path}: {value!r}"
        return
    assert value.keys() == schema.keys(), path
    for name, inner in schema.items():
        check(value[name], inner, f"{path}.{name}")


def run_keys(save: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    common = {
        "num_layers": 2, "train_micro_batch_size_per_gpu": 2, "train_iters": 6, "checkpoint_factor": 100,
        "eval_interval": 2, "eval_iters": 1, "save": str(save), "load": str(save), "log_param_norm": True,
        "trainable": {"last_layers": 1, "head": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "lr_scaling": "linear",
    }  # fmt: skip
    return config(NEOX, common, *parts, **overrides)


def read(save: Path, name: str) -> Any:
    return json.loads((save / f"training_{name}.json").read_text())


@pytest.mark.parametrize("layout", cells(["pp2"], product=["zero1"]))
def test_a_run_that_was_stopped_and_went_on(layout: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    run_ranks(run_with_signal, ranks, run_keys(tmp_path, keys), signal.SIGTERM, 2, 0)
    stopped = read(tmp_path, "summary")
    assert (stopped["status"], stopped["reason"], stopped["iteration"]) == ("stopped", "signal SIGTERM", 2), (
        "after its save"
    )
    assert [record["iteration"] for record in read(tmp_path, "history")] == [0, 1, 2]
    run_ranks(run_to_end, ranks, run_keys(tmp_path, keys))
    records, summary = read(tmp_path, "history"), read(tmp_path, "summary")
    assert [record["iteration"] for record in records] == list(range(7)), "each step once"
    rows = metrics(tmp_path)
    for record, row in zip(records, rows, strict=True):
        share = record.pop("trainable_share")
        assert record == {k: v for k, v in row.items() if k != "run_id" and not k.startswith("parameter_norms/")}
        assert share == summary["parameters"]["trainable_share"]
    required = {
        "train/lm_loss",
        "validation/lm_loss",
        "train/learning_rate",
        "train/grad_norm",
        "runtime/tokens_per_sec",
    }
    assert required <= records[6].keys()
    check(summary, SCHEMA)
    assert summary["status"] == "finished" and summary["run_id"] == stopped["run_id"]
    data = 1 if layout == "pp2" else 2
    assert summary["layout"] == {"tensor": 1, "pipe": 2 // data, "context": 1, "data": data, "zero_stage": data - 1}
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
    first_record, second_record, _ = history(rows, 0.25)
    assert first_record == {"iteration": 0, "validation/lm_loss": 3.0, "trainable_share": 0.25}
    assert second_record["train/grad_norm"] is None and second_record["device/memory_gib_max"] == 2.5
    assert "weight_norms/x" not in second_record
    assert training_time(rows) == (4 * 0.5 + 2.0, 4 * 0.5 * 100 + 2.0 * 25)


# -- router_load.jsonl ---------------------------------------------------------------------------------------
MOE = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_layer_freq": [0, 1]}


def loads(save: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (save / "logs" / "router_load.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("ranks", "layout"), [
    (1, {}), (2, {"pipe_parallel_size": 2}), pytest.param(2, {"expert_parallel_size": 2}, marks=pytest.mark.more),
])  # fmt: skip
def test_lines_of_a_run_and_of_one_that_goes_back(ranks: int, layout: dict[str, Any], tmp_path: Path) -> None:
    save = tmp_path / "run"
    values = config(LLAMA, ADAMW, MOE, layout, train_iters=6, checkpoint_factor=3, save=str(save), load=str(save))
    run_ranks(run_to_end, ranks, values)
    lines, rows = loads(save), metrics(save)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["run_id"] for line in lines} == {rows[-1]["run_id"]}
    max_loads = {row["iteration"]: row["train/moe_max_load"] for row in rows if "train/moe_max_load" in row}
    for line in lines:
        assert line["layers"] == [3, 5] and len(line["load"]) == 2
        assert all(len(layer) == 4 and sum(layer) == pytest.approx(4.0, abs=2e-3) for layer in line["load"])
        assert max(map(max, line["load"])) == pytest.approx(max_loads[line["iteration"]], abs=6e-4)
    assert lines[0]["load"] != lines[-1]["load"]
    if ranks == 1:
        (save / "latest").write_text("global_step3")
        path = save / "logs" / "router_load.jsonl"
        path.write_text(path.read_text().replace('"iteration": 5', '"iteration": 5, "old": 1') + '{"iteration": 7, "lo')
        run_ranks(run_to_end, ranks, values)
        assert loads(save) == lines


@pytest.mark.parametrize(("log_interval", "train_iters", "steps"), [
    (1, 100, 1), (1, 500, 1), (1, 501, 2), (10, 100_000, 200), (100, 1000, 100), (300, 100_000, 300),
])  # fmt: skip
def test_lines_are_few(log_interval: int, train_iters: int, steps: int) -> None:
    args = NeoXArgs.from_dict(config(LLAMA, MOE, log_interval=log_interval, train_iters=train_iters))
    assert interval(args) == steps and steps % log_interval == 0 and train_iters / steps <= MOST_LINES


def test_only_steps_with_a_line_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked in the step of a line, and waited for in the one after it, or at a save."""
    events: list[str] = []

    class Reading:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values.tolist()
            events.append("begin")

        def read(self) -> list[float]:
            events.append("read")
            return self.values

    monkeypatch.setattr(router_load, "HostCopy", Reading)
    routing = RoutingCounts(torch.tensor([[0.5, 1.5], [2.0, 1 / 3]]), {})
    args = NeoXArgs.from_dict(config(LLAMA, MOE, log_interval=3))
    training: Any = SimpleNamespace(engine=SimpleNamespace(routing=routing), args=args)
    file: Any = SimpleNamespace(write=lambda row: events.append(json.dumps(row)), close=lambda: events.append("close"))
    callback = RouterLoad(training, file, [3, 5])
    events_by_step: dict[int, list[str]] = {}
    for iteration in range(8):
        step = Step(iteration, 8 * iteration, 32, StepResult(torch.zeros(()), None, False) if iteration else None)
        callback.on_step_end(training, step)
        if iteration == 6:
            callback.on_save(training, step, False)
        events_by_step[iteration], events[:] = list(events), []

    def line(iteration: int) -> str:
        return f'{{"iteration": {iteration}, "layers": [3, 5], "load": [[0.5, 1.5], [2.0, 0.333]]}}'

    nonempty = {iteration: step_events for iteration, step_events in events_by_step.items() if step_events}
    assert nonempty == {3: ["begin"], 4: ["read", line(3)], 6: ["begin", "read", line(6)]}
    callback.on_step_end(training, Step(9, 72, 32, StepResult(torch.zeros(()), None, False)))
    callback.on_error(training, RuntimeError())
    callback.close()
    assert events == ["begin", "close"], "after a failure nothing is waited for"
