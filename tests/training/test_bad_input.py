"""Bad input ends with one clear line that names file, key or line and the fix; nothing is half written."""

import contextlib
import io
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
import yaml

from tests.disks import mount
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, LLAMA, config, run_to_end

DATA = GOLDEN / "dataset" / "corpusA_text_document"


def call_train(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    """For the pool: train.py's exit code and what it prints for a person."""
    import train

    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = train.main(argv)
        except SystemExit as problem:
            code = int(problem.code or 0)
    return code, printed.getvalue()


def _bin_idx(change: Callable[[Path], None]) -> Callable[[Path], list[str]]:
    """A copy of the data, changed."""

    def make(folder: Path) -> list[str]:
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{DATA}{suffix}", folder / f"text{suffix}")
        change(folder)
        return [f"data_path={folder / 'text'}"]

    return make


def _checkpoint(change: Callable[[Path], None], *settings: str) -> Callable[[Path], list[str]]:
    """A trained run, its newest checkpoint changed, to go on to step 4."""

    def make(folder: Path) -> list[str]:
        values = {**_values(folder), "train_iters": 2, "lr_decay_iters": 4, "load": None}
        run_ranks(run_to_end, 1, values)
        change(folder / "run" / "global_step2")
        return ["lr_decay_iters=4", *settings]

    return make


def _values(folder: Path) -> dict[str, Any]:
    values = config(LLAMA, num_layers=2, train_iters=4, checkpoint_factor=2, train_micro_batch_size_per_gpu=4)
    return {**values, "save": str(folder / "run"), "load": str(folder / "run")}


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Trap:
    """A pickle that would leave a mark when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/neox-trap",)


def _trap(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Trap()))


def _huge_token(folder: Path) -> None:
    tokens = np.fromfile(folder / "text.bin", dtype=np.uint16)
    tokens[:] = 60000
    tokens.tofile(folder / "text.bin")


CASES: list[tuple[str, Callable[[Path], list[str]] | list[str], str]] = [
    ("unknown key", ["num_layer=3"], r"--set: num_layer: unknown key; did you mean num_layers"),
    ("wrong type", ["num_layers=twelve"], r'num_layers: expected int, got "?twelve'),
    ("missing file", ["data_path=/nowhere/x"], r"/nowhere/x\.idx: no such file"),
    ("empty .idx", _bin_idx(lambda f: (f / "text.idx").write_bytes(b"")), r"text\.idx"),  # type: ignore[arg-type,return-value]
    ("truncated .bin", _bin_idx(lambda f: os.truncate(f / "text.bin", 1000)), r"text\.bin"),
    ("foreign .idx", _bin_idx(lambda f: (f / "text.idx").write_bytes(b"PK" * 500)), r"text\.idx"),  # type: ignore[arg-type,return-value]
    ("token id", _bin_idx(_huge_token), r"text.*60000"),
    ("short data", ["seq_length=20000", "max_position_embeddings=20000"], r"one sample takes seq_length \+ 1 = 20001"),
    ("heads and tp", ["model_parallel_size=3", "num_kv_heads=null"], r"model_parallel_size: 3 .*num_attention_heads 4"),
    ("kv heads and tp", ["model_parallel_size=3"], r"model_parallel_size: 3 is more than num_kv_heads 2"),
    ("world size", ["pipe_parallel_size=2"], r"1 ranks cannot be divided"),
    ("pipe > layers", ["pipe_parallel_size=5"], r"pipe_parallel_size.*num_layers"),
    ("ZeRO 2 and pipe", ["pipe_parallel_size=2", "zero_optimization.stage=2"], r"zero_optimization\.stage"),
    ("cudnn on CPU", ["attention_backend=cudnn"], r"attention_backend: cudnn needs a GPU"),
    ("small vocabulary", ["padded_vocab_size=64"], r"smaller than the tokenizer's vocabulary"),
    ("no tensorboard", ["tensorboard_dir=/proc/x"], r"tensorboard_dir: /proc/x"),
    ("no tokenizer", ["vocab_file=/nowhere.json"], r"/nowhere\.json: no such file"),
    (
        "other tokenizer",
        _checkpoint(lambda p: None, "tokenizer_type=CharLevelTokenizer"),
        r"vocab_file: .* has 512 tokens, but .* was trained with another tokenizer, of at most 384",
    ),
    (
        "missing byte",
        _checkpoint(lambda p: os.truncate(p / "layer_02-model_00-model_states.pt", 5000)),
        r"layer_02-model_00-model_states\.pt \(5,000 bytes instead of [\d,]+\)",
    ),
    (
        "flipped byte",
        _checkpoint(lambda p: _flip(p / "layer_02-model_00-model_states.pt")),
        r"layer_02-model_00-model_states\.pt \(checksum\)",
    ),
    (
        "missing layer",
        _checkpoint(lambda p: (p / "layer_03-model_00-model_states.pt").unlink()),
        r"layer_03-model_00-model_states\.pt \(missing\)",
    ),
    (
        "other hidden size",
        _checkpoint(lambda p: None, "hidden_size=64"),
        r"hidden_size: 64 \(--set\), but the model of .* had 32",
    ),
    ("a pickle", _checkpoint(_trap), r"mp_rank_00_model_states\.pt"),
    ("port in use", ["master_port=PORT", "num_gpus=2"], r"master_port.*PORT|PORT.*in use|PORT.*taken"),
]


@pytest.mark.parametrize(("name", "make", "line"), CASES, ids=[case[0] for case in CASES])
def test_one_line(
    name: str,
    make: Callable[[Path], list[str]] | list[str],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("/tmp/neox-trap").unlink(missing_ok=True)
    settings = make if isinstance(make, list) else make(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*") if p.name not in ("index_cache", ".lock"))
    (tmp_path / "a.yml").write_text(yaml.safe_dump(_values(tmp_path)))
    if name == "port in use":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            settings, line = [s.replace("PORT", port) for s in settings], line.replace("PORT", port)
            code, printed = run_ranks(call_deepy, 1, [str(tmp_path / "a.yml"), "--set", *settings], init=False)[0]
    else:
        code, printed = run_ranks(call_train, 1, [str(tmp_path / "a.yml"), "--set", *settings], init=False)[0]
    with capsys.disabled():
        print(f"\n  {name:18s} {printed.strip().splitlines()[-1][:150] if printed.strip() else '(nothing)'}", end=" ")
    assert code != 0
    assert re.search(line, printed), printed
    assert len(printed.strip().splitlines()) <= 2 and "Traceback" not in printed
    assert not Path("/tmp/neox-trap").exists(), "a pickle was executed"
    after = sorted(
        p.name for p in tmp_path.rglob("*")
        if p.name not in ("index_cache", ".lock", "a.yml", "logs", "run", "metrics.jsonl", "status.json")
        and "index_cache" not in p.parts and not p.name.startswith("neox_args")
    )  # fmt: skip
    assert set(after) <= set(before), "nothing is left behind"


def call_deepy(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    """For the pool: deepy.py's exit code and what it prints for a person."""
    import deepy

    sys.argv = ["deepy.py", "train.py", *argv]
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
        code = deepy.main()
    return code, printed.getvalue()


# -- real file systems ---------------------------------------------------------------------------------------


def on_small_disk(
    rank: int, world_size: int, argv: list[str], folder: str, kilobytes: int, read_only: bool, check: bool
) -> tuple[int, str, list[str], str]:
    """For the pool: train.py with `save` on a tmpfs; exit code, printed lines, files left, `latest`."""
    mount(Path(folder), kilobytes, read_only)
    if not check:
        from megatron.training.checkpoint.resume import Checkpointer

        Checkpointer._check_space = lambda self, save: None  # type: ignore[method-assign]
    code, printed = call_train(0, 1, argv)
    files = sorted(p.name for p in Path(folder).iterdir())
    latest = Path(folder) / "latest"
    return code, printed, files, latest.read_text() if latest.exists() else ""


@pytest.mark.parametrize("check", [True, False], ids=["seen before writing", "met while writing"])
def test_full_disk(check: bool, tmp_path: Path) -> None:
    """The first checkpoint fits, the second does not."""
    (tmp_path / "disk").mkdir()
    values = {**_values(tmp_path), "save": str(tmp_path / "disk"), "load": None, "index_cache_dir": str(tmp_path / "i")}
    (tmp_path / "a.yml").write_text(yaml.safe_dump({**values, "log_dir": str(tmp_path / "logs")}))
    run_ranks(run_to_end, 1, {**values, "save": str(tmp_path / "size"), "train_iters": 2, "lr_decay_iters": 4})
    size = sum(p.stat().st_size for p in (tmp_path / "size" / "global_step2").rglob("*") if p.is_file())
    argv = [str(tmp_path / "a.yml")]
    code, printed, files, latest = run_ranks(
        on_small_disk, 1, argv, str(tmp_path / "disk"), int(size * 1.7) // 1024, False, check, init=False
    )[0]
    assert code == 1 and latest == "global_step2", printed
    assert [name for name in files if name.startswith((".tmp", "global"))] == ["global_step2"], "nothing half written"
    expected = "a checkpoint takes about" if check else "the checkpoint could not be written"
    assert not check or re.search(r"takes about [\d.]+ [kM]B, [\d.]+ (kB|bytes) are free; make room", printed), printed
    assert expected in printed and str(tmp_path / "disk") in printed and len(printed.strip().splitlines()) == 1


def cut_off(rank: int, world_size: int, argv: list[str], file: str) -> tuple[int, str]:
    """For the pool: train.py, whose data ends in step 2."""
    from megatron.training.native.engine import NativeEngine

    step, count = NativeEngine.train_step, [0]

    def then_cut(self: NativeEngine, *given: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            os.truncate(file, 0)
        return step(self, *given)

    NativeEngine.train_step = then_cut  # type: ignore[method-assign]
    return call_train(rank, world_size, argv)


def test_data_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    """A worker dies of it, as of too little shared memory."""
    settings = _bin_idx(lambda folder: None)(tmp_path)
    values = {**_values(tmp_path), "num_workers": 1, "train_iters": 40, "index_cache_dir": str(tmp_path / "i")}
    (tmp_path / "a.yml").write_text(yaml.safe_dump(values))
    argv = [str(tmp_path / "a.yml"), "--set", *settings]
    code, printed = run_ranks(cut_off, 1, argv, str(tmp_path / "text.bin"), init=False)[0]
    assert code == 1 and len(printed.splitlines()) == 1, printed
    assert printed.startswith(f"train.py: error: {tmp_path}/text.bin: 0 bytes, but {tmp_path}/text.idx describes")


def test_read_only_save(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    values = {**_values(tmp_path), "save": str(tmp_path / "disk"), "load": None, "index_cache_dir": str(tmp_path / "i")}
    (tmp_path / "a.yml").write_text(yaml.safe_dump(values))
    code, printed, files, _ = run_ranks(
        on_small_disk, 1, [str(tmp_path / "a.yml")], str(tmp_path / "disk"), 1000, True, True, init=False
    )[0]
    assert code == 1 and not files
    assert "cannot be written (Read-only file system); set another save" in printed
