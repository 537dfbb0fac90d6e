"""The peak of a step by part, beside sizes that are known without it, and beside torch's profiler."""

import json
from contextlib import nullcontext, suppress
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron.model.head import OutputProjection
from megatron.mpu import ParallelGroups
from megatron.training import train
from megatron.training.builtin_callbacks.memory_parts import MemoryParts
from megatron.training.metrics.memory_tracker import PARTS, MemoryTimeline, MemoryTracker
from tests.methods.preferences.test_reference import FLY, PADDED, preferences
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.checkpoint.test_resume import refusals
from tests.training.runs import LAYOUTS, LLAMA, before_steps, begin, begin_each, config

BF16 = {"precision": "bfloat16"}
ROWS = 2 * 32  # tokens of a micro-batch


def tiny(folder: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    keys = {"num_layers": 2, "train_micro_batch_size_per_gpu": 2, "train_iters": 3, "profile_memory": 3}
    return config(LLAMA, keys, *parts, log_dir=str(folder), **overrides)


def runs(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """For the pool: runs to their ends; of this rank the elements of all and of trained parameters."""
    counts = []
    for training in begin_each(configs):
        params = list(training.engine.stage.parameters())
        trained = [param.numel() for param in params if param.requires_grad]
        counts.append({"all": sum(p.numel() for p in params), "trained": sum(trained), "count": len(trained)})
        train(training)
    return counts


def measured(folder: Path) -> list[dict[str, int]]:
    """The parts of each rank, whose sum is the peak."""
    report = json.loads((folder / "memory_parts.json").read_text())
    for rank in report["ranks"]:
        assert list(rank["parts"]) == list(PARTS) and sum(rank["parts"].values()) == rank["peak"]
    highest, timeline = max(report["ranks"], key=lambda rank: rank["peak"]), report["timeline"]
    assert report["iteration"] == 3 and report["device"] == "cpu" and timeline["rank"] == highest["rank"]
    assert max(map(sum, zip(*timeline["parts"].values(), strict=True))) == highest["peak"]
    return [rank["parts"] for rank in report["ranks"]]


def test_what_is_kept_has_the_sizes_of_parameters(tmp_path: Path) -> None:
    cases = {"fp32": {}, "bf16": BF16, "deepspeed": {**BF16, "engine": "deepspeed"}}
    sizes = run_ranks(runs, 1, [tiny(tmp_path / name, keys) for name, keys in cases.items()])[0]
    assert sizes[0]["all"] == sizes[0]["trained"] == 12_288 + 2 * (3 * 32**2 + 3 * 32 * 48 + 2 * 32) + 32
    for name, size in zip(cases, sizes, strict=True):
        (parts,) = measured(tmp_path / name)
        moments, masters = 2 * 4 * size["trained"], 4 * size["trained"]
        if name == "fp32":
            assert parts["weights"] == parts["gradients"] == 4 * size["all"]
            assert parts["optimizer states"] == moments + 4 * size["count"]
        else:
            assert parts["weights"] == 2 * size["all"]
            assert moments + masters <= parts["optimizer states"] <= moments + masters + 4 * size["count"]
            assert parts["gradients"] >= 4 * size["trained"], "fp32, summed over micro-batches"


def test_logits_and_activations(tmp_path: Path) -> None:
    """Logits and their softmax grow with their columns; what a block keeps is gone where it runs again."""
    cases = {str(vocabulary): {"make_vocab_size_divisible_by": vocabulary} for vocabulary in (384, 512, 640)}
    longer, recompute = {"num_layers": 4}, {"checkpoint_activations": True}
    cases |= {"again": recompute, "longer": longer, "longer, again": longer | recompute}
    run_ranks(runs, 1, [tiny(tmp_path / name, keys) for name, keys in cases.items()])
    parts = {name: measured(tmp_path / name)[0] for name in cases}
    for smaller, larger in (("384", "512"), ("512", "640")):
        assert parts[larger]["logits"] - parts[smaller]["logits"] == 2 * 4 * 128 * ROWS
        assert parts[larger]["activations"] == parts[smaller]["activations"]
    assert parts["again"]["activations"] < parts["384"]["activations"] / 3
    block_inputs = parts["longer, again"]["activations"] - parts["again"]["activations"]
    assert block_inputs == 2 * 4 * 32 * ROWS, "the inputs of two blocks"
    assert parts["longer"]["logits"] == parts["again"]["logits"] == parts["384"]["logits"]
    assert parts["384"]["buffers"] == 2 * 4 * 8 * ROWS, "a table of sines and one of cosines, head_dim wide"


def test_every_rank_its_own(tmp_path: Path) -> None:
    names = ("tp2", "pp2", "pp2, deepspeed", "zero3")
    layouts = {name: LAYOUTS[name.removesuffix(", deepspeed")][1] for name in names}
    layouts["pp2, deepspeed"] = {**layouts["pp2"], "engine": "deepspeed"}
    counts_by_rank = run_ranks(runs, 2, [tiny(tmp_path / name, layouts[name]) for name in names])
    for name, *sizes in zip(names, *counts_by_rank, strict=True):
        parts = measured(tmp_path / name)
        for size, part in zip(sizes, parts, strict=True):
            local = size["trained"] // 2 if name == "zero3" else size["trained"]  # DTensors say the whole size
            states = part["optimizer states"]
            if name == "pp2, deepspeed":
                assert part["weights"] == part["gradients"] == 4 * size["all"]
                assert 0 < states - 3 * 4 * size["all"] <= 4 * size["count"], "DeepSpeed has masters here"
                continue
            assert states == 2 * 4 * local + 4 * size["count"]
            if name != "zero3":
                assert part["weights"] == part["gradients"] == 4 * local
            else:  # and what is gathered: at the peak not all, but the head, which is the embedding's
                assert 4 * local + 4 * 12_288 <= part["weights"] < 4 * 2 * local
                assert part["gradients"] >= 4 * local
        assert not name.startswith("pp2") or parts[0]["logits"] == 0 < parts[1]["logits"]


def test_adapters_and_a_reference(tmp_path: Path) -> None:
    lora = tiny(tmp_path / "lora", lora={"r": 4, "alpha": 8})
    tuned = preferences(tmp_path, FLY, PADDED, train_iters=3, profile_memory=3, log_dir=str(tmp_path / "dpo"))
    adapted, policy = run_ranks(runs, 1, [lora, tuned])[0]
    (parts,) = measured(tmp_path / "lora")
    assert parts["weights"] == 4 * adapted["all"] and adapted["trained"] < adapted["all"] / 4
    assert parts["gradients"] == 4 * adapted["trained"]
    assert parts["optimizer states"] == 2 * 4 * adapted["trained"] + 4 * adapted["count"]
    (parts,) = measured(tmp_path / "dpo")
    assert parts["weights"] == 2 * 4 * policy["all"], "the policy's, and the reference's"
    assert parts["gradients"] == 4 * policy["all"]


def peaks(rank: int, world_size: int, values: dict[str, Any], folder: Path) -> tuple[int, int, bool]:
    """For the pool: a step's peak by the tracker and by torch's profiler; and whether it is the same step."""
    training = begin(values)
    engine, steps = training.engine, batches_of(training)
    engine.train_step(next(steps), 0.0)
    batches = next(steps)
    loss_before = engine.train_step(list(batches), 0.0).loss
    tracker = MemoryTracker(torch.device("cpu"), engine.tensors, False)
    with tracker.watching(engine.stage):
        tracked_loss = engine.train_step(list(batches), 0.0).loss
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.train_step(list(batches), 0.0)
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    profiler_peak = max(accumulate(change for _, change in changes))
    memory_timeline = tracker.timeline()
    batch_bytes = sum(values[0] for values in memory_timeline.bytes_by_part.values()) + memory_timeline.parts["other"]
    return memory_timeline.peak - batch_bytes, profiler_peak, torch.equal(loss_before, tracked_loss)


def test_the_peak_is_what_the_profiler_says(tmp_path: Path) -> None:
    """Peaks differ by what kernels take within an operation, below 1 % here. "Other" holds the batches."""
    ((tracked_peak, profiler_peak, same_step),) = run_ranks(peaks, 1, tiny(tmp_path), tmp_path)
    assert same_step, "a step under it is the same step"
    assert 0.99 * profiler_peak <= tracked_peak <= profiler_peak


class Projection(OutputProjection):
    def __init__(self) -> None:
        super().__init__(ParallelGroups.single(), False)
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor, use: Any = None) -> torch.Tensor:
        return x @ self.weight.t()


def test_a_step_added_up_by_hand() -> None:
    """The peak comes when the sum is made.

    5 rows of 4 hold `x` and its double; 5 rows of 3 hold the logits and their squares. The sum, two
    parameters and the gathered storage are added. Later the output layer makes the gradient of its input,
    and Adam its states, which belong to no part here."""
    head = Projection()
    frozen = nn.Parameter(torch.ones(6), requires_grad=False)  # 24 bytes, of no one's list
    gathered = torch.ones(100).untyped_storage()
    gathered.resize_(0)
    x = torch.ones(5, 4, requires_grad=True)
    optimizer = torch.optim.Adam([head.weight], foreach=False)
    tracker = MemoryTracker(torch.device("cpu"), lambda: {"weights": [head.weight], "gradients": []}, False)
    with tracker.watching(head):  # type: ignore[arg-type]
        frozen.abs()  # 24 bytes for a moment
        doubled = x * 2
        logits = head(doubled)
        gathered.resize_(400)
        loss = logits.square().sum()
        gathered.resize_(0)
        del logits
        loss.backward()
        optimizer.step()
    memory_timeline = tracker.timeline()
    assert memory_timeline.parts == {
        "weights": 48 + 24, "gradients": 0, "optimizer states": 0, "buffers": 0, "activations": 80 + 60 + 4,
        "logits": 60, "other": 80 + 400,
    }  # fmt: skip
    assert memory_timeline.peak == 756 and _get_current_dispatch_mode() is None
    last = {part: values[-1] for part, values in memory_timeline.bytes_by_part.items()}
    assert last["gradients"] == 48 and last["logits"] == 0 and last["other"] == 80 + 2 * 48 + 4
    assert last["activations"] == 80 + 4 + 80, "the gradient of x, which is not a parameter"
    assert max(memory_timeline.bytes_by_part["logits"]) == 80
    assert head.weight.grad is not None and not head.weight._backward_hooks, "nothing is left behind"


def test_what_a_gpu_has_over_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_timeline = MemoryTimeline(
        {"weights": 60, "activations": 30}, 90, 4, [0], {"weights": [60], "activations": [0]}
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100)
    groups = SimpleNamespace(device=torch.device("cuda:0"), world_rank=3)
    for compiled, name in (("block", "compiled code, allocator, libraries"), (False, "allocator, libraries")):
        callback = object.__new__(MemoryParts)
        callback._training = SimpleNamespace(groups=groups, args=SimpleNamespace(compile=compiled))  # type: ignore[assignment]
        measured = callback._measured(SimpleNamespace(timeline=lambda: memory_timeline))  # type: ignore[arg-type]
        assert measured["peak"] == 100 and measured["rank"] == 3
        assert measured["parts"] == {"weights": 60, "activations": 30, f"other ({name})": 10}


def test_beside_compiled_code_nothing_is_hooked() -> None:
    """torch would compile anew."""
    head = Projection()
    tracker = MemoryTracker(torch.device("cpu"), lambda: {"gradients": []}, True)
    x = torch.ones(5, 4)
    with tracker.watching(head):  # type: ignore[arg-type]
        head(x * 2).sum()
        assert not head.weight._backward_hooks
    assert tracker.timeline().parts["activations"] == 80 + 80 + 4, "unseen before: compiled code may have made it"


def counted_steps(rank: int, world_size: int, configs: list[dict[str, Any]], failing: int) -> list[list[bool]]:
    """For the pool: of each run which steps were counted; the step `failing` of them fails."""
    counted_by_run = []
    for training in begin_each(configs):
        flags = list[bool]()

        def note(number: int, flags: list[bool] = flags) -> None:
            flags.append(_get_current_dispatch_mode() is not None)
            if number == failing:
                raise RuntimeError("on purpose")

        before_steps(training, note)
        with suppress(RuntimeError) if failing else nullcontext():
            train(training)
        counted_by_run.append([*flags, _get_current_dispatch_mode() is not None])
    return counted_by_run


def test_one_step_is_counted(tmp_path: Path) -> None:
    configs = [tiny(tmp_path / "a", train_iters=4), tiny(tmp_path / "b", profile_memory=None)]
    assert run_ranks(counted_steps, 1, configs, 0) == [[[False, False, True, False, False], [False] * 4]]
    assert measured(tmp_path / "a") and not (tmp_path / "b" / "memory_parts.json").exists()
    assert run_ranks(counted_steps, 1, [tiny(tmp_path)], 3) == [[[False, False, True, False]]], "not after a failure"
    assert not (tmp_path / "memory_parts.json").exists()


def test_refusals(tmp_path: Path) -> None:
    nowhere = {key: value for key, value in tiny(tmp_path).items() if key != "log_dir"}
    configs = [nowhere, tiny(tmp_path, profile_memory=4), tiny(tmp_path, compile="block")]
    folder, late_step, compiled = run_ranks(refusals, 1, configs, trained=True)[0]
    assert "profile_memory: " in folder and "log_dir" in folder
    assert "profile_memory: 4" in late_step and "train_iters 3" in late_step
    assert "profile_memory: " in compiled and "compile: false" in compiled
