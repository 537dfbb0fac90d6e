"""A step that does not fit ends the run with what was asked, what is held and which keys help."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.training import out_of_memory
from megatron.training.out_of_memory import MemoryUse, advice, explained, held_bytes, holdings
from tests.model.stages import small
from tests.pool import run_ranks
from tests.training.runs import LLAMA, config
from tests.training.test_bad_input import call_train

# As torch 2.11 to 2.13 write it.
GPU_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 79.11 GiB of which 310.06 MiB is "
    "free. Including non-PyTorch memory, this process has 78.80 GiB memory in use. Of the allocated memory 76.10 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
GIB = 2**30
FAILS = """
import torch
from megatron.callbacks import Callback

class Fails(Callback):
    def on_step_start(self, run, batches):
        def on_gradients(parts):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
        return on_gradients if run.iteration == 1 else None
"""


def test_a_gpu_in_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    use = MemoryUse(79 * GIB, 310 * 2**20, 76 * GIB, 77 * GIB)
    monkeypatch.setattr(out_of_memory, "_device_memory", lambda device: use)
    weight = torch.empty(4 * GIB, device="meta")
    monkeypatch.setattr(
        out_of_memory, "held_bytes", lambda parts, device: {part: 4 * GIB * len(list(parts[part])) for part in parts}
    )

    def backward() -> None:  # its name tells where
        raise torch.OutOfMemoryError(GPU_TEXT)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        backward()
    args = small(train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=2).for_world(4)
    parts = {"weights": [weight], "gradients": [], "optimizer states": [weight, weight]}
    problem = explained(caught.value, args, 3, torch.device("cuda", 3), "in step 12", lambda: parts)
    asked, held, helps = str(problem).splitlines()
    assert re.search("rank 3: .*step 12.*backward.*2.50 GiB.*0.30 GiB.*79.00 GiB", asked)
    parts_of = "cuda:3 .*weights 4.00 GiB.*optimizer states 8.00 GiB.*64.00 GiB.*unused 1.00 GiB.*other.* 1.70 GiB"
    assert re.search(parts_of, held) and re.search("train_micro_batch_size_per_gpu: 8 -> 4 ", helps)


def test_other_errors_stay_what_they_are() -> None:
    problem = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert explained(problem, small(), 0, torch.device("cpu"), "in step 1") is problem


def test_a_machine_without_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    text = str(explained(caught.value, small().for_world(1), 0, torch.device("cpu"), "in the first step"))
    assert re.search(f"^rank 0: .*first step.*{2**58 / GIB:.2f} GiB", text)


def test_storages_are_counted_once() -> None:
    weight = torch.zeros(1024)
    parts = {"weights": [weight, weight.view(32, 32)], "gradients": [torch.zeros(10), weight[5:]]}
    assert held_bytes(parts, torch.device("cpu")) == {"weights": 4096, "gradients": 40}
    assert holdings(MemoryUse(100, 50), {"weights": 0}) == "nothing of this run's"


OFFLOAD = "zero_optimization.offload_optimizer.device: none -> cpu"


EVERYTHING: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "checkpoint_activations": True,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "world", "keys"),
    [
        ({}, 2, []),
        (
            {"train_micro_batch_size_per_gpu": 3}, 2,
            ["train_micro_batch_size_per_gpu: 3 -> 2", "gradient_accumulation_steps: 4 -> 6"],
        ),
        (
            {"checkpoint_activations": False}, 2,
            ["checkpoint_activations: false -> true", "recompute_granularity: full -> selective"],
        ),
        ({"recompute_granularity": "selective"}, 2, ["recompute_granularity: selective -> full"]),
        ({"recompute_every": 3}, 2, ["recompute_every: 3 -> 1"]),
        (
            {"checkpoint_activations": False, "activation_memory_budget": 0.5}, 2,
            ["activation_memory_budget: 0.5 -> 0.25"],
        ),
        ({"checkpoint_num_layers": 2}, 2, ["checkpoint_num_layers: 2 -> 1"]),
        ({"model_parallel_size": 2}, 2, ["sequence_parallel: false -> true"]),
        ({"zero_optimization": {"stage": 1}}, 2, ["zero_optimization.stage: 1 -> 2", OFFLOAD]),
        ({"zero_optimization": {"stage": 1}}, 1, [OFFLOAD]),
    ],
)  # fmt: skip
def test_only_keys_that_would_still_help(changes: dict[str, Any], world: int, keys: list[str]) -> None:
    lines = advice(small(**EVERYTHING | changes).for_world(world))
    words = lines[0].removeprefix("what helps, in this order: ").split("; ") if lines else []
    assert [word.rpartition(" (")[0] for word in words] == keys


def test_a_run_ends_with_them(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    save = {"save": str(tmp_path / "run"), "checkpoint_factor": 3, "train_micro_batch_size_per_gpu": 8}
    values = config(LLAMA, save, train_iters=3, callbacks=[f"{tmp_path}/fails.py:Fails"])
    (tmp_path / "a.yml").write_text(yaml.safe_dump(values))
    code, printed = run_ranks(call_train, 1, [str(tmp_path / "a.yml")], init=False)[0]
    facts = ("rank 0: .*out of memory.*step 2.*20.0 MiB", "weights .*optimizer states", r"false -> true \(default\)")
    assert code == 1
    for line, words in zip(printed.splitlines(), facts, strict=True):
        assert re.search(words, line), printed
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["status"] == "failed" and "out of memory in step 2" in json.dumps(status)
