"""Measures the step time [ms] and peak memory of runs that train only a part of the model (`trainable`).

Each row is a fresh run of a few steps of one model on this machine, without validation or checkpoints; the
fastest step counts.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ("configs/quickstart.yml", "configs/local_setup.yml")
MODEL = (
    "num_layers=12", "hidden_size=512", "num_attention_heads=8", "seq_length=512", "max_position_embeddings=512",
    "train_micro_batch_size_per_gpu=4", "gradient_accumulation_steps=1", "no_weight_tying=false",
)  # fmt: skip
ROWS = {
    "all": (),
    "last 2 + tied head": ("trainable.last_layers=2", "trainable.head=true"),
    "the same, embedding_gradient: false": (
        "trainable.last_layers=2", "trainable.head=true", "trainable.embedding_gradient=false",
    ),
    "last 2": ("trainable.last_layers=2",),
}  # fmt: skip


def measure(settings: tuple[str, ...], steps: int, folder: Path) -> tuple[float, float]:
    """Runs `steps` steps. Returns (seconds of the fastest step after the third, peak bytes of a process).

    settings: `key=value` overrides. Raises RuntimeError if the run fails."""
    command = [
        sys.executable, "deepy.py", "--num_gpus", "1", "train.py", *CONFIG, "--set", "save=null", "load=null",
        "checkpoint_factor=null", "tensorboard_dir=null", f"log_dir={folder}", f"train_iters={steps}",
        "lr_decay_iters=null", "log_interval=1", "eval_iters=0", *MODEL, *settings,
    ]  # fmt: skip
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    output = running.stdout.read()
    _, status, usage = os.wait4(running.pid, 0)
    if status != 0:
        raise RuntimeError(output[-2000:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [row["runtime/iteration_time"] for row in rows[3:] if "runtime/iteration_time" in row]
    return min(times), usage.ru_maxrss * 1024.0


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps a row (10)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more keys, as precision=fp32")
    options = parser.parse_args()
    subprocess.run([sys.executable, "tools/quickstart_data.py"], cwd=ROOT, check=True)
    print(f"{'trained':38} {'ms a step':>10} {'peak GB':>8}", flush=True)
    for name, settings in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                seconds, peak = measure((*options.set, *settings), options.steps, Path(folder))
            except RuntimeError as problem:
                sys.stderr.write(f"trainable.py: {name}: the run failed\n{problem}\n")
                return 1
        print(f"{name:38} {seconds * 1000:10.0f} {peak / 1e9:8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
