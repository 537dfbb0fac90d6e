"""Memory reports from configurations and from runs; the plot and summary of metrics.jsonl."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.operations.loss_plot import ordinary, read_curve
from tests.training.runs import GOLDEN, LLAMA, config
from tools import plot_metrics
from tools.profile_memory import main

MIB = 2**20
Plot = Callable[..., tuple[int, str, str]]
RANKS = [{"rank": 0, "peak": 4 * MIB, "parts": {"weights": MIB, "activations": 3 * MIB, "other": 0}},
         {"rank": 1, "peak": 8 * MIB, "parts": {"weights": 2 * MIB, "activations": 5 * MIB, "other": MIB}}]  # fmt: skip
TABLE = """\
peak of iteration 7, rank 1 of 2, cpu
part               memory    share         least          most
weights          2.00 MiB    25.0%      1.00 MiB      2.00 MiB
activations      5.00 MiB    62.5%      3.00 MiB      5.00 MiB
other            1.00 MiB    12.5%      0.00 MiB      1.00 MiB
peak             8.00 MiB   100.0%      4.00 MiB      8.00 MiB
"""


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """The folder of a run that goes on, with what it has measured."""
    logs = tmp_path / "save" / "logs"
    logs.mkdir(parents=True)
    points = {"weights": [2 * MIB, 2 * MIB], "activations": [0, 5 * MIB], "other": [0, MIB]}
    timeline = {"rank": 1, "changes": 2, "moments": [0, 2], "parts": points}
    content = {"iteration": 7, "device": "cpu", "compile": False, "ranks": RANKS, "timeline": timeline}
    (logs / "memory_parts.json").write_text(json.dumps(content))
    (logs / "metrics.jsonl").write_text(json.dumps({"iteration": 9}) + "\n")
    (logs.parent / "status.json").write_text(json.dumps({"status": "running", "iteration": 8}))
    return logs.parent


def test_a_run(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_path in (save, save / "logs", save / "logs" / "memory_parts.json"):
        assert main([str(run_path)]) == 0
        assert capsys.readouterr() == (TABLE, f"wrote the picture: {save / 'logs' / 'memory_parts.png'}\n")
    picture = save / "logs" / "memory_parts.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert main([str(save), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == RANKS and not picture.exists()
    assert main([str(save), "--output", str(tmp_path / "mine.svg")]) == 0
    assert "<svg" in (tmp_path / "mine.svg").read_text()


def test_mistakes(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*words: object) -> str:
        assert main([str(word) for word in words]) == 1
        error = capsys.readouterr().err
        assert error.startswith("profile_memory.py: ") and error.count("\n") == 1
        return error

    file = save / "logs" / "memory_parts.json"
    assert "is the folder of a run; give it alone, without --set" in error_of(save, "--set", "precision=fp32")
    for content in ("[]", "{}"):
        file.write_text(content)
        assert f"{file}: " in error_of(save)
    file.unlink()
    assert f"{file}: no such file; set profile_memory to an iteration after 9 (its last so far)" in error_of(save)
    assert "holds no run: neither status.json nor metrics.jsonl" in error_of(tmp_path)
    assert "nothing.yml: no such file" in error_of(tmp_path / "nothing.yml")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a.yml"), "--iterations", "1"])
    assert "--iterations must be at least 2, because the first step" in capsys.readouterr().err


def test_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A long run that saves and validates; nothing is left of the short one; --set wins."""
    keys: dict[str, Any] = {
        "num_layers": 2, "train_iters": 5000, "lr_decay_style": "cosine", "warmup": None, "warmup_iters": 100,
        "save": str(tmp_path / "save"), "checkpoint_factor": 1, "extra_save_iters": [0], "eval_iters": 10,
        "load": str(tmp_path / "save"), "tensorboard_dir": str(tmp_path / "board"), "index_cache_dir": None,
        "train_micro_batch_size_per_gpu": 2, "num_gpus": 1,
    }  # fmt: skip
    data = sorted((GOLDEN / "dataset").rglob("*"))
    (tmp_path / "conf.yml").write_text(yaml.safe_dump(config(LLAMA, keys)))
    monkeypatch.chdir(tmp_path)
    assert main(["conf.yml", "--set", "profile_memory=2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "peak of iteration 2, rank 0 of 1, cpu" and printed[1].split() == ["part", "memory", "share"]
    names = [line[: line.index(".")].rsplit(maxsplit=1)[0].strip() for line in printed[2:]]
    shares = dict(zip(names, (float(line.split()[-1][:-1]) for line in printed[2:]), strict=True))
    assert shares.pop("peak") == 100.0 and sum(shares.values()) == pytest.approx(100.0, abs=0.5)
    assert shares["optimizer states"] == pytest.approx(2 * shares["weights"], rel=0.02)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf.yml", "memory_parts.png"]
    assert sorted((GOLDEN / "dataset").rglob("*")) == data, "index maps"


@pytest.fixture
def plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plot:
    """The command on a file of these rows, if there are any."""

    def run(rows: list[dict[str, Any]], *words: object) -> tuple[int, str, str]:
        if rows:
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(sys, "argv", ["plot_metrics.py", str(tmp_path / "metrics.jsonl"), *map(str, words)])
        return plot_metrics.main(), *capsys.readouterr()

    return run


def test_plot_and_summary(plot, tmp_path):
    rows = [
        {"iteration": 0, "consumed_tokens": 0, "validation/lm_loss": 6.95},
        {"iteration": 10, "consumed_tokens": 40960, "train/lm_loss": 5.5},
        {"iteration": 20, "consumed_tokens": 81920, "train/lm_loss": 4.5, "validation/lm_loss": 4.256},
    ]
    rows[-1]["validation/unigram_entropy"] = 6.0201
    code, out, _ = plot(rows)
    assert code == 0
    picture = tmp_path / "loss.png"
    assert re.match(r"validation loss 6\.950 -> 4\.256 .* 81,920 tokens .*6\.020.*: " + str(picture), out)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_steps_that_unlearn_have_curves_of_their_own(plot):
    forget = {"train/batch_type": 1.0, "train/gd_retain_loss": 2.0, "train/lm_loss": 70.0}
    rows = []
    for tokens, loss, forgotten in ((64, 3.0, 2.5), (128, 2.9, 5.25)):
        rows += [{"iteration": tokens, "consumed_tokens": tokens, "train/batch_type": 0.0, "train/lm_loss": loss},
                 {"iteration": tokens + 1, "consumed_tokens": tokens, **forget,
                  "train/ga_actual_loss": forgotten}]  # fmt: skip
    assert read_curve(ordinary(rows), "train/lm_loss") == ([64, 128], [3.0, 2.9])
    assert re.search("forget 2.500 -> 5.250; .*retain 2.000 -> 2.000", plot(rows)[1])


def test_missing_metrics(plot):
    code, _, err = plot([])
    assert code == 1 and err.startswith("plot_metrics.py: ") and err.count("\n") == 1
