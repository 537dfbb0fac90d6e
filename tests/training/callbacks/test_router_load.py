"""router_load.jsonl: what its lines say, after a restart too, and that only steps with a line are asked."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.callbacks import Step, StepResult
from megatron.model.moe import RoutingCounts
from megatron.neox_arguments import NeoXArgs
from megatron.training.callbacks import router_load
from megatron.training.callbacks.router_load import MOST_LINES, RouterLoad, interval
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

MOE = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_layer_freq": [0, 1]}


def lines(save: Path, name: str = "router_load.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (save / "logs" / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, {}), (2, {"pipe_parallel_size": 2}), (2, {"expert_parallel_size": 2})]
)
def test_lines_of_a_run_and_of_one_that_goes_back(ranks: int, layout: dict[str, Any], tmp_path: Path) -> None:
    save = tmp_path / "run"
    values = config(LLAMA, ADAMW, MOE, layout, train_iters=6, checkpoint_factor=3, save=str(save), load=str(save))
    run_ranks(run_to_end, ranks, values)
    found, rows = lines(save), lines(save, "metrics.jsonl")
    assert [line["iteration"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert {line["run_id"] for line in found} == {rows[-1]["run_id"]}
    most = {row["iteration"]: row["train/moe_max_load"] for row in rows if "train/moe_max_load" in row}
    for line in found:
        assert line["layers"] == [3, 5] and len(line["load"]) == 2
        assert all(len(layer) == 4 and sum(layer) == pytest.approx(4.0, abs=2e-3) for layer in line["load"])
        assert max(map(max, line["load"])) == pytest.approx(most[line["iteration"]], abs=6e-4)
    assert found[0]["load"] != found[-1]["load"]
    if ranks == 1:
        (save / "latest").write_text("global_step3")
        path = save / "logs" / "router_load.jsonl"
        path.write_text(path.read_text().replace('"iteration": 5', '"iteration": 5, "old": 1') + '{"iteration": 7, "lo')
        run_ranks(run_to_end, ranks, values)
        assert lines(save) == found


def test_a_dense_model_has_no_file(tmp_path: Path) -> None:
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, train_iters=1, checkpoint_factor=1, save=str(tmp_path)))
    assert (tmp_path / "logs" / "metrics.jsonl").exists()
    assert not (tmp_path / "logs" / "router_load.jsonl").exists()


@pytest.mark.parametrize(
    ("log_interval", "train_iters", "steps"),
    [(1, 100, 1), (1, 500, 1), (1, 501, 2), (10, 100_000, 200), (100, 1000, 100), (300, 100_000, 300)],
)
def test_lines_are_few(log_interval: int, train_iters: int, steps: int) -> None:
    args = NeoXArgs.from_dict(config(LLAMA, MOE, log_interval=log_interval, train_iters=train_iters))
    assert interval(args) == steps
    assert steps % log_interval == 0 and train_iters / steps <= MOST_LINES


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
    after: dict[int, list[str]] = {}
    for iteration in range(8):
        result = StepResult(torch.zeros(()), None, False) if iteration else None
        step = Step(iteration, 8 * iteration, 32, result)
        callback.on_step_end(training, step)
        if iteration == 6:
            callback.on_save(training, step, False)
        after[iteration], events[:] = list(events), []

    def line(iteration: int) -> str:
        return f'{{"iteration": {iteration}, "layers": [3, 5], "load": [[0.5, 1.5], [2.0, 0.333]]}}'

    assert {i: said for i, said in after.items() if said} == {
        3: ["begin"], 4: ["read", line(3)], 6: ["begin", "read", line(6)],
    }  # fmt: skip
    callback.on_step_end(training, Step(9, 72, 32, StepResult(torch.zeros(()), None, False)))
    callback.on_error(training, RuntimeError())
    callback.close()
    assert events == ["begin", "close"], "after a failure nothing is waited for"
