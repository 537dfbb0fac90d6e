"""A plan as a page: the bars of its charts, and the page in Chromium."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from megatron.planning.fake_cuda import shim
from tests.operations.report.chromium import open_sound_page

needs_compiler = pytest.mark.skipif(shim.lacking() is not None, reason=f"left out: {shim.lacking()}")
KEYS = {"pipe_parallel_size": 2, "train_batch_size": 8, "gradient_accumulation_steps": None}


@pytest.mark.more
@needs_compiler
def test_bars_are_as_long_as_their_numbers(tmp_path: Path, plan: Callable[..., tuple[int, str, str]]) -> None:
    file = tmp_path / "plan.html"
    code, out, _ = plan("--gpus", "2", "--gpu", "h100", "--gpu-memory", "0.01", "--html", str(file), **KEYS)
    assert code == 1
    text = unescape(file.read_text())
    memory, seconds = re.findall(r"<svg.*?</svg>", text, re.S)
    bars = re.findall(r'width="([\d.]+)" height="20" fill="\S+"><title>([\w ]+): (\S+) GiB', memory)
    lengths = {float(width) / float(size) for width, _, size in bars if float(size) > 0.0}
    assert max(lengths) < 1.01 * min(lengths) and {name for _, name, _ in bars} >= {"weights", "activations"}
    [limit] = re.findall(r'x1="([\d.]+)"', memory)
    assert float(limit) == pytest.approx(110 + 0.01 * max(lengths), rel=0.01)
    shares = [line.rsplit(None, 2) for line in out.splitlines() if line.endswith("%")]
    assert all(f"{name.strip()}: {size} s" in seconds for name, size, share in shares if float(share[:-1]) >= 0.1)
    assert "http" not in text and all(line.strip() in text for line in out.splitlines()[:2])
    code, _, err = plan("--gpus", "1", "--html", str(tmp_path / "nowhere" / "plan.html"))
    assert code == 1 and "--html" in err and "nowhere" in err


@pytest.mark.browser
@needs_compiler
def test_in_chromium(tmp_path: Path, plan: Callable[..., tuple[int, str, str]]) -> None:
    """A plan that does not fit: the page shows it, with the ways out, and nothing reaches over its edge."""
    file = tmp_path / "plan.html"
    keys = {**KEYS, "train_micro_batch_size_per_gpu": 4}
    flags = ("--gpus", "2", "--gpu", "h100")
    memory = max(stage["step"] for stage in json.loads(plan(*flags, "--json", **keys)[1])["stages"])
    plan(*flags, "--gpu-memory", str(0.8 * memory / 2**30), "--html", str(file), **keys)
    for width in (1200, 400):
        answers = open_sound_page(file, width)
        assert "does not fit" in answers["text"] and answers["text"].count("--set ") == 3
        assert "waiting for other pipeline ranks" in answers["text"]
