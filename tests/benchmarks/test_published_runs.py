"""Published throughputs: every row is complete, and none can tune a planner and test it too."""

import pytest

from benchmarks.published_runs import args_of, read_rows, tflops
from megatron.launch.gpus import read_gpus


@pytest.mark.parametrize("name", ["a", "b"])
def test_rows_are_complete(name: str) -> None:
    rows, gpus = read_rows(name), read_gpus()
    assert len(rows) > 80 and len({row["framework"] for row in rows}) >= 8 and len({row["gpu"] for row in rows}) >= 5
    for row in rows:
        peak = gpus[row["gpu"]].fp8 if row["precision"] == "fp8" else gpus[row["gpu"]].bf16
        assert 0.01 < tflops(row) / peak < 1 and row["source"].startswith("https://"), row


def test_lists_share_no_run() -> None:
    runs = [{(row["framework"], row["model"], row["gpu"], row["gpus"]) for row in read_rows(name)} for name in "ab"]
    assert not runs[0] & runs[1]


def test_flops_of_llama_3_8b() -> None:
    """6 FLOPs a parameter that a token meets, and attention's half square (torchtitan counts all of it)."""
    row = next(row for row in read_rows("b") if row["model"] == "Llama-3-8B" and row["tokens_per_s"] == 8290)
    parameters = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336) + 128256 * 4096
    per_token = 6 * parameters + 32 * 6 * 4096 * row["seq_length"]
    assert tflops(row) == pytest.approx(8290 * per_token / 1e12, rel=1e-3)
    assert args_of(row).data_parallel_size == 256
