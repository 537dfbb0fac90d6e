"""A long run of a tiny model with everything that repeats, and what it holds: memory, descriptors, threads, time.

    python benchmarks/soak.py                    # 20,000 steps: minutes on an idle CPU core
    python benchmarks/soak.py --steps 2000       # a first look

The run saves, validates, logs every step, lengthens its rows by a curriculum and changes the weights of a blend.
Growth of memory is a line through the resident set at the end of each block of 1,000 steps, the first tenth of
the run left out.
"""  # noqa: W505 (lines to copy)

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.compare_commits import COMMON, GOLDEN, OBJECTIVES  # noqa: E402

BLOCK = 1000


@dataclass(frozen=True)
class Sample:
    """The resources of rank 0 after a step. seconds: time of the block of steps that ends here."""

    step: int
    memory_mb: float
    descriptors: int
    threads: int
    seconds: float


def configuration(folder: Path, steps: int) -> dict[str, Any]:
    """Returns the keys of the run."""
    corpora = [str(GOLDEN / f"corpus{name}_text_document") for name in "AB"]
    return {
        **COMMON, **OBJECTIVES["pretraining"], "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2,
        "seq_length": 32, "max_position_embeddings": 32, "train_batch_size": 2, "train_iters": steps,
        "data_path": None, "split": None, "train_data_paths": corpora, "valid_data_paths": corpora[:1],
        "train_data_weight_schedule": {"weights": [[1.0, 1.0], [1.0, 3.0]], "until": [steps // 2]},
        "curriculum_learning": {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
            "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": steps // 20,
            "difficulty_step": 8}},
        "eval_interval": max(1, steps // 40), "eval_iters": 2, "checkpoint_factor": max(1, steps // 40),
        "keep_last_n_checkpoints": 2, "save": str(folder / "run"), "load": str(folder / "run"),
        "log_dir": str(folder / "logs"), "log_interval": 1, "num_workers": 1,
    }  # fmt: skip


def measure(folder: Path, steps: int) -> list[Sample]:
    """Trains, and returns a sample at the end of each block of steps."""
    (folder / "run.yml").write_text(yaml.safe_dump(configuration(folder, steps)))
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", "1", "train.py", str(folder / "run.yml")]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    samples: list[Sample] = []
    block = max(1, min(BLOCK, steps // 20))
    output: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        seconds = 0.0
        for line in run.stdout:
            match = re.search(r"iteration +(\d+)/.*iteration \(ms\): ([\d.]+)", line)
            if match is None:
                output = [*output[-20:], line]
                continue
            seconds += float(match[2]) / 1000
            if int(match[1]) % block == 0:
                samples.append(_sample(_rank_of(run.pid), int(match[1]), seconds))
                print(samples[-1], flush=True)
                seconds = 0.0
    if run.returncode != 0:
        sys.exit(f"soak.py: the run ended with code {run.returncode}:\n{''.join(output)}")
    return samples


def _rank_of(launcher: int) -> int:
    (pid,) = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return int(pid)


def _sample(pid: int, step: int, seconds: float) -> Sample:
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(step, int(status["VmRSS"]) / 1e3, descriptors, int(status["Threads"]), seconds)


def slope(samples: list[Sample]) -> float:
    """Returns the growth of memory in MB per 1,000 steps, of a line through the samples after the first
    tenth."""
    settled_samples = samples[len(samples) // 10 :]
    result = statistics.linear_regression(
        [sample.step for sample in settled_samples], [sample.memory_mb for sample in settled_samples]
    )
    return 1000 * result.slope


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="number of steps (default: 20,000)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run is ended, too
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(Path(folder), options.steps)
    settled_samples = samples[len(samples) // 10 :]
    descriptors, threads = (
        {getattr(sample, name) for sample in settled_samples} for name in ("descriptors", "threads")
    )
    print(f"memory: {slope(samples):+.3f} MB per 1,000 steps; at the end {samples[-1].memory_mb:.0f} MB")
    print(f"descriptors: {sorted(descriptors)}; threads: {sorted(threads)}")
    print(f"time: the last block took {samples[-1].seconds / samples[1].seconds:.3f} of the second one's")
    return 0


if __name__ == "__main__":
    run_command(main)
