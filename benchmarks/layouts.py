"""Speed of the quickstart model on this machine, one process and two in each layout: tokens per second.

Each row is a fresh run of a few dozen steps without validation or checkpoints; the median step counts.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ("configs/quickstart.yml", "configs/local_setup.yml")
PIPELINE = ("pipe_parallel_size=2", "gradient_accumulation_steps=4")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 process": (1, ()),
    "data 2": (2, ()),
    "data 2, ZeRO 1": (2, ("zero_optimization.stage=1",)),
    "tensor 2": (2, ("model_parallel_size=2",)),
    "tensor 2, sequence parallel": (2, ("model_parallel_size=2", "sequence_parallel=true")),
    "pipeline 2, 4 micro-batches": (2, PIPELINE),
    "the same, DeepSpeed": (2, (*PIPELINE, "engine=deepspeed")),
}


def tokens_per_second(ranks: int, settings: tuple[str, ...], steps: int, folder: Path) -> float:
    """Trains for `steps` steps. Returns the median tokens per second of all steps after the first five.

    settings: `key=value` overrides. Raises RuntimeError with the end of the output if the run fails."""
    command = [
        sys.executable, "deepy.py", "--num_gpus", str(ranks), "train.py", *CONFIG, "--set", "save=null", "load=null",
        "checkpoint_factor=null", "tensorboard_dir=null", f"log_dir={folder}", f"train_iters={steps}",
        "lr_decay_iters=null", "log_interval=1", "eval_iters=0", *settings,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["runtime/tokens_per_sec"] for row in rows[5:] if "runtime/tokens_per_sec" in row)


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps a layout (30)")
    options = parser.parse_args()
    subprocess.run([sys.executable, "tools/quickstart_data.py"], cwd=ROOT, check=True)
    print(f"{'layout':30} tokens/s", flush=True)
    for name, (ranks, settings) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                speed = f"{tokens_per_second(ranks, settings, options.steps, Path(folder)):,.0f}"
            except RuntimeError as problem:
                sys.stderr.write(f"layouts.py: {name}: the run failed\n{problem}\n")
                return 1
        print(f"{name:30} {speed:>8}", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
