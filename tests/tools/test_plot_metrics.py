"""The plot and the sentence made of metrics.jsonl."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "plot_metrics.py"


def run(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *map(str, words)], capture_output=True, text=True, timeout=60)


def test_plot_and_summary(tmp_path):
    rows = [
        {"iteration": 0, "consumed_tokens": 0, "validation/lm_loss": 6.95},
        {"iteration": 10, "consumed_tokens": 40960, "train/lm_loss": 5.5},
        {"iteration": 20, "consumed_tokens": 81920, "train/lm_loss": 4.5, "validation/lm_loss": 4.256},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stats.json").write_text('{"validation_unigram_entropy": 6.0201}')
    done = run(tmp_path / "metrics.jsonl", "--stats", tmp_path / "stats.json")
    assert done.returncode == 0, done.stderr
    picture = tmp_path / "loss.png"
    sentence = "validation loss 6.950 -> 4.256 nats per token after 81,920 tokens (unigram entropy 6.020)"
    assert done.stdout == f"{sentence}; plot: {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_steps_that_unlearn_have_curves_of_their_own(tmp_path):
    from megatron.operations.loss_plot import ordinary, read_curve

    forget = {"train/batch_type": 1.0, "train/gd_retain_loss": 2.0, "train/lm_loss": 70.0}
    rows = [
        {"consumed_tokens": 64, "train/batch_type": 0.0, "train/lm_loss": 3.0},
        {"consumed_tokens": 64, **forget, "train/ga_actual_loss": 2.5},
        {"consumed_tokens": 128, "train/batch_type": 0.0, "train/lm_loss": 2.9},
        {"consumed_tokens": 128, **forget, "train/ga_actual_loss": 5.25},
    ]
    assert read_curve(ordinary(rows), "train/lm_loss") == ([64, 128], [3.0, 2.9])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(tmp_path / "metrics.jsonl")
    assert "loss to forget 2.500 -> 5.250; loss to retain 2.000 -> 2.000; plot: " in done.stdout, done.stderr


def test_metrics_that_are_not_there(tmp_path):
    done = run(tmp_path / "metrics.jsonl")
    assert done.returncode == 1
    assert done.stderr.startswith("plot_metrics.py: ") and done.stderr.count("\n") == 1
