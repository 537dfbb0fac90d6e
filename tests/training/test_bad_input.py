"""Bad input ends with one line that names file, key or line and the fix; a full device with what helps."""

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron.training import out_of_memory
from megatron.training.out_of_memory import MemoryUse, advice, explained, held_bytes, holdings
from tests.disks import mount
from tests.model.stages import small
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, LLAMA, config, run_to_end

DATA = str(GOLDEN / "dataset" / "corpusA_text_document")
BYTES = os.path.getsize(f"{DATA}.bin")


def call_train(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    """For the pool: train.py's exit code and what it prints for a person."""
    import train

    return call_main(lambda: train.main(argv))


def call_deepy(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    """For the pool: the same of deepy.py."""
    import deepy

    sys.argv = ["deepy.py", "train.py", *argv]
    return call_main(deepy.main)


def call_main(main: Callable[[], int]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main()
        except SystemExit as problem:
            code = int(problem.code or 0)
    return code, printed.getvalue()


def _bin_idx(change: Callable[[Path], Any]) -> Callable[[Path], list[str]]:

    def make(folder: Path) -> list[str]:
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{DATA}{suffix}", folder / f"text{suffix}")
        change(folder)
        return [f"data_path={folder / 'text'}"]

    return make


def _checkpoint(change: Callable[[Path], Any], *settings: str) -> Callable[[Path], list[str]]:
    """A trained run, its newest checkpoint changed, to go on to step 4."""

    def make(folder: Path) -> list[str]:
        run_ranks(run_to_end, 1, {**_values(folder), "train_iters": 2, "lr_decay_iters": 4, "load": None})
        change(folder / "run" / "global_step2")
        return ["lr_decay_iters=4", *settings]

    return make


def _values(folder: Path, **overrides: Any) -> dict[str, Any]:
    values = config(LLAMA, num_layers=2, train_iters=4, checkpoint_factor=2, train_micro_batch_size_per_gpu=4)
    return {**values, "save": str(folder / "run"), "load": str(folder / "run"), **overrides}


def written(folder: Path, **overrides: Any) -> str:
    (folder / "a.yml").write_text(yaml.safe_dump(_values(folder, **overrides)))
    return str(folder / "a.yml")


class Trap:
    """A pickle that would leave a mark when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/neox-trap",)


def _trap(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Trap()))


CASES: dict[str, tuple[Callable[[Path], list[str]] | list[str], str]] = {
    "unknown key": (["num_layer=3"], r"--set: num_layer: .*num_layers"),
    "missing file": (["data_path=/nowhere/x"], r"--set: data_path: /nowhere/x\.idx: "),
    "missing validation": (["data_path=null", "split=null", f"train_data_paths=[{DATA}]",
                            "valid_data_paths=[/nowhere/v]"], r"valid_data_paths: /nowhere/v\.idx: .*eval_iters=0"),
    "empty .idx": (_bin_idx(lambda f: (f / "text.idx").write_bytes(b"")), r"text\.idx"),
    "truncated .bin": (_bin_idx(lambda f: os.truncate(f / "text.bin", 1000)), r"text\.bin"),
    "foreign .idx": (_bin_idx(lambda f: (f / "text.idx").write_bytes(b"PK" * 500)), r"text\.idx"),
    "token id": (_bin_idx(lambda f: np.full(BYTES // 2, 60000, np.uint16).tofile(f / "text.bin")), r"text.*60000"),
    "short data": (["seq_length=20000", "max_position_embeddings=20000"], r"seq_length.* 20001"),
    "heads and tp": (["model_parallel_size=3", "num_kv_heads=null"], r"model_parallel_size: 3 .*num_attention_heads 4"),
    "world size": (["pipe_parallel_size=2"], r"1 ranks"),
    "stages of a list": (["pipe_parallel_size=2", "pipeline_layers=[2]"], r"pipeline_layers: .*pipe_parallel_size 2"),
    "cudnn on CPU": (["attention_backend=cudnn"], r"attention_backend: cudnn .*GPU"),
    "small vocabulary": (["padded_vocab_size=64"], r"padded_vocab_size.*64.*vocabulary|64.*tokenizer"),
    "no tensorboard": (["tensorboard_dir=/proc/x"], r"tensorboard_dir: .*/proc/x"),
    "no tokenizer": (["vocab_file=/nowhere.json"], r"/nowhere\.json: "),
    "other tokenizer": (_checkpoint(lambda p: None, "tokenizer_type=CharLevelTokenizer"),
                        r"vocab_file: .*512.*tokenizer.*384"),
    # Damage, and other models: checkpoint/test_writer.py.
    "a pickle": (_checkpoint(_trap), r"mp_rank_00_model_states\.pt"),
}  # fmt: skip


def assert_one_line(outcome: tuple[int, str], line: str) -> None:
    code, printed = outcome
    assert code != 0 and re.search(line, printed), printed
    assert len(printed.strip().splitlines()) <= 2 and "Traceback" not in printed


@pytest.mark.parametrize("name", CASES)
def test_one_line(name: str, tmp_path: Path) -> None:
    Path("/tmp/neox-trap").unlink(missing_ok=True)
    make, line = CASES[name]
    settings = make if isinstance(make, list) else make(tmp_path)
    files_before = {p.name for p in tmp_path.rglob("*")}
    assert_one_line(run_ranks(call_train, 1, [written(tmp_path), "--set", *settings], init=False)[0], line)
    assert not Path("/tmp/neox-trap").exists(), "a pickle was executed"
    files_after = [
        p for p in tmp_path.rglob("*") if "index_cache" not in p.parts and not p.name.startswith("neox_args")
    ]
    run_files = {"index_cache", ".lock", "a.yml", "logs", "run", "metrics.jsonl", "status.json"}
    assert {p.name for p in files_after} <= files_before | run_files, "nothing is left behind"


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        argv = [written(tmp_path), "--set", f"master_port={port}", "num_gpus=2"]
        assert_one_line(run_ranks(call_deepy, 1, argv, init=False)[0], f"master_port.*{port}|{port}.*(in use|taken)")


# -- real file systems ---------------------------------------------------------------------------------------
def on_small_disk(
    rank: int, world_size: int, argv: list[str], folder: str, kilobytes: int, read_only: bool, check: bool
) -> tuple[int, str, list[str], str]:
    """For the pool: train.py with `save` on a tmpfs; exit code, printed lines, files left, `latest`."""
    mount(Path(folder), kilobytes, read_only)
    if not check:
        from megatron.training.checkpoint.writer import CheckpointWriter

        CheckpointWriter._check_space = lambda self, save: None  # type: ignore[method-assign]
    code, printed = call_train(0, 1, argv)
    files = sorted(p.name for p in Path(folder).iterdir())
    latest = Path(folder) / "latest"
    return code, printed, files, latest.read_text() if latest.exists() else ""


def argv_on_disk(folder: Path) -> tuple[list[str], str]:
    """The arguments of a run that saves on the disk of that name, and the disk."""
    disk = folder / "disk"
    disk.mkdir()
    places = {"save": str(disk), "load": None, "index_cache_dir": str(folder / "i"), "log_dir": str(folder / "logs")}
    return [written(folder, **places)], str(disk)


@pytest.mark.parametrize("check", [True, False], ids=["seen before writing", "met while writing"])
def test_full_disk(check: bool, tmp_path: Path) -> None:
    """The first checkpoint fits, the second does not."""
    argv, disk = argv_on_disk(tmp_path)
    run_ranks(run_to_end, 1, _values(tmp_path, save=str(tmp_path / "size"), load=None, train_iters=2, lr_decay_iters=4))
    size = sum(p.stat().st_size for p in (tmp_path / "size" / "global_step2").rglob("*") if p.is_file())
    disk_args = (argv, disk, int(size * 1.7) // 1024, False, check)
    code, printed, files, latest = run_ranks(on_small_disk, 1, *disk_args, init=False)[0]
    assert code == 1 and latest == "global_step2", printed
    assert [name for name in files if name.startswith((".tmp", "global"))] == ["global_step2"], "nothing half written"
    facts = r"[\d.]+ [kM]B, .*[\d.]+ (kB|bytes) " if check else "could not be written"
    assert re.search(facts, printed) and disk in printed and len(printed.strip().splitlines()) == 1, printed


def test_read_only_save(tmp_path: Path) -> None:
    argv, disk = argv_on_disk(tmp_path)
    code, printed, files, _ = run_ranks(on_small_disk, 1, argv, disk, 1000, True, True, init=False)[0]
    assert code == 1 and not files and "Read-only file system" in printed and "save" in printed


def run_with_truncated_data(rank: int, world_size: int, argv: list[str], file: str) -> tuple[int, str]:
    """For the pool: train.py, whose data ends in step 2."""
    from megatron.training.native.engine import NativeEngine

    step, count = NativeEngine.train_step, [0]

    def truncate_in_step_2(self: NativeEngine, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            os.truncate(file, 0)
        return step(self, *args)

    NativeEngine.train_step = truncate_in_step_2  # type: ignore[method-assign]
    return call_train(rank, world_size, argv)


def test_data_truncated_while_it_is_read(tmp_path: Path) -> None:
    """A worker dies of it, as of too little shared memory."""
    path = written(tmp_path, num_workers=1, train_iters=40, index_cache_dir=str(tmp_path / "i"))
    argv = [path, "--set", *_bin_idx(lambda folder: None)(tmp_path)]
    code, printed = run_ranks(run_with_truncated_data, 1, argv, str(tmp_path / "text.bin"), init=False)[0]
    assert code == 1 and len(printed.splitlines()) == 1, printed
    assert re.search(rf"^train.py: error: {tmp_path}/text.bin: 0 bytes.*{tmp_path}/text.idx", printed)


# -- out of memory
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
    monkeypatch.setattr(out_of_memory, "held_bytes", lambda parts, _: {p: 4 * GIB * len([*parts[p]]) for p in parts})

    def backward() -> None:  # its name tells where
        raise torch.OutOfMemoryError(GPU_TEXT)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        backward()
    args = small(train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=2).for_world(4)
    parts = {"weights": [weight], "gradients": [], "optimizer states": [weight, weight]}
    problem = explained(caught.value, args, 3, torch.device("cuda", 3), "in step 12", lambda: parts)
    request_line, held_line, help_line = str(problem).splitlines()
    assert re.search("rank 3: .*step 12.*backward.*2.50 GiB.*0.30 GiB.*79.00 GiB", request_line)
    parts_of = "cuda:3 .*weights 4.00 GiB.*optimizer states 8.00 GiB.*64.00 GiB.*unused 1.00 GiB.*other.* 1.70 GiB"
    assert re.search(parts_of, held_line) and re.search("train_micro_batch_size_per_gpu: 8 -> 4 ", help_line)


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
    assert holdings(MemoryUse(100, 50), {"weights": 0}) == "no tensors of this run"


OFFLOAD, NO_RECOMPUTE = "zero_optimization.offload_optimizer.device: none -> cpu", {"checkpoint_activations": False}
ALL_SAVINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "checkpoint_activations": True,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


@pytest.mark.parametrize(("changes", "world", "keys"), [
    ({}, 2, []),
    ({"train_micro_batch_size_per_gpu": 3}, 2,
     ["train_micro_batch_size_per_gpu: 3 -> 2", "gradient_accumulation_steps: 4 -> 6"]),
    (NO_RECOMPUTE, 2, ["checkpoint_activations: false -> true", "recompute_granularity: full -> selective"]),
    ({"recompute_granularity": "selective"}, 2, ["recompute_granularity: selective -> full"]),
    ({"recompute_every": 3}, 2, ["recompute_every: 3 -> 1"]),
    ({**NO_RECOMPUTE, "activation_memory_budget": 0.5}, 2, ["activation_memory_budget: 0.5 -> 0.25"]),
    ({"checkpoint_num_layers": 2}, 2, ["checkpoint_num_layers: 2 -> 1"]),
    ({"model_parallel_size": 2}, 2, ["sequence_parallel: false -> true"]),
    ({"zero_optimization": {"stage": 1}}, 2, ["zero_optimization.stage: 1 -> 2", OFFLOAD]),
    ({"zero_optimization": {"stage": 1}}, 1, [OFFLOAD]),
    ({"zero_optimization": {"stage": 0}}, 1, ["zero_optimization.stage: 0 -> 1", OFFLOAD]),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, 1, ["zero_optimization.stage: 1 -> 2"]),
])  # fmt: skip
def test_only_keys_that_would_still_help(changes: dict[str, Any], world: int, keys: list[str]) -> None:
    lines = advice(small(**ALL_SAVINGS | changes).for_world(world))
    words = lines[0].partition("first: ")[2].split("; ") if lines else []
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
