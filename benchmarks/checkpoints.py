"""How long a save holds up training, waited for and beside the steps in one run, and what cutting it anew
takes.

A model of a few hundred MB trains on the quickstart data in this process. What a save copies is copied file
by file, into ordinary memory and into memory that is used again (page-locked where there is a GPU), in turns;
saves of both kinds take turns, and steps made while one is written are timed beside the others. Then the last
checkpoint is resharded by another process, whose peak memory is told (file pages that it maps included).
"""

import argparse
import contextlib
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

CONFIG = ("configs/quickstart.yml", "configs/local_setup.yml")
# ru_maxrss would begin at what this process had when it started the other.
RESHARD = """
import sys
from tools.ckpts import reshard
def peak():
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
base = peak()
reshard.main(sys.argv[1:])
print(base, peak())
"""


def begin(folder: Path, options: argparse.Namespace) -> Any:
    """Returns a small training run that is ready for its first step; it saves into `folder`."""
    from megatron.launch import process_info
    from megatron.neox_arguments import load
    from megatron.training import start

    args = load(
        [ROOT / name for name in CONFIG],
        {
            "num_layers": options.layers, "hidden_size": options.hidden, "num_attention_heads": options.hidden // 64,
            "save": str(folder / "run"), "load": None, "log_dir": str(folder / "logs"), "tensorboard_dir": None,
            "eval_iters": 0, "precision": options.precision, "train_iters": 10_000, "lr_decay_iters": None,
            "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1, "train_batch_size": None,
            "allow_changed_data": True, "keep_last_n_checkpoints": 1,
        },
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        return start(args, process_info())


def measure_copies(training: Any, turns: int) -> tuple[dict[str, list[float]], float]:
    """Measures copying the checkpoint tensors to the host.

    Returns the seconds of each turn by kind of memory, and the GB of one copy."""
    from megatron.checkpointing.tensor_files import named_tensors
    from megatron.training.checkpoint.host_copies import HostCopies, PageLocking

    checkpointer, device = training.checkpointer, training.groups.device
    reused = original_copies = checkpointer._copies
    if device.type == "cpu":
        reused = HostCopies(device, PageLocking(lambda address, size: None, lambda address: None, lambda: None))
    kinds = {"copy, ordinary memory": HostCopies(device, None), "copy, memory used again": reused}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    copied = 0
    for turn in range(turns + 1):
        for name, copies in kinds.items():
            checkpointer._copies = copies
            copied, start = 0, time.monotonic()
            for _, state in checkpointer.states(training.progress):
                copied += sum(tensor.nbytes for _, tensor in named_tensors(state))
            if turn > 0:  # the first makes the memory
                seconds[name].append(time.monotonic() - start)
    checkpointer._copies = original_copies
    return seconds, copied / 1e9


def measure(training: Any, saves: int) -> dict[str, list[float]]:
    """Measures blocking and background saves, and steps with and without a background save.

    Returns lists of seconds by name."""
    from megatron.training.loop import steps_of
    from megatron.training.method import StepData

    seconds_by_kind: dict[str, list[float]] = {
        name: []
        for name in (
            "save, waited for", "save, beside", "until whole, beside", "step, alone", "step, beside",
            "first save, beside",
        )
    }  # fmt: skip
    batches = map(StepData.take, steps_of(training))
    checkpointer, progress = training.checkpointer, training.progress

    def step(name: str) -> None:
        start = time.monotonic()
        result = training.engine.train_step(next(batches), training.schedule(progress.iteration))
        float(result.loss)
        progress.iteration += 1
        seconds_by_kind[name].append(time.monotonic() - start)

    step("step, alone")
    seconds_by_kind["step, alone"].clear()  # the first one warms up
    for number in range(2 * saves + 2):
        step("step, alone")
        in_background = number % 2 == 1
        start = time.monotonic()
        checkpointer.save(progress, in_background=in_background)
        if number > 1:
            seconds_by_kind["save, beside" if in_background else "save, waited for"].append(time.monotonic() - start)
        elif in_background:  # on a GPU it also locks the memory that later ones use
            seconds_by_kind["first save, beside"].append(time.monotonic() - start)
        if in_background:
            while checkpointer.writing:
                step("step, beside")
            checkpointer.wait()
            seconds_by_kind["until whole, beside"].append(time.monotonic() - start)
    return seconds_by_kind


def reshard(source: Path, target: Path, tensor_size: int) -> tuple[float, float]:
    """Runs reshard.py in a process of its own. Returns its seconds, and its peak GB above start-up memory."""
    start = time.monotonic()
    command = [sys.executable, "-c", RESHARD, "--input_dir", str(source), "--output_dir", str(target)]
    done = subprocess.run([*command, "--tp", str(tensor_size)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    base, peak = map(int, done.stdout.splitlines()[-1].split())
    return time.monotonic() - start, (peak - base) * 1024 / 1e9


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="blocks (12)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    parser.add_argument("--precision", default="bfloat16", help="bfloat16 (default) or fp32")
    parser.add_argument("--saves", type=int, default=4, help="saves of each kind (4)")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size to cut the checkpoint for (2)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    subprocess.run([sys.executable, "tools/quickstart_data.py"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as temporary_dir:
        folder = Path(temporary_dir)
        training = begin(folder, options)
        seconds_by_kind = measure(training, options.saves)
        copies, copied = measure_copies(training, options.saves)
        training.close()
        checkpoints = sorted((folder / "run").glob("global_step*"), key=lambda path: path.stat().st_mtime)
        size = sum(file.stat().st_size for file in checkpoints[-1].rglob("*") if file.is_file()) / 1e9
        try:
            seconds, memory = reshard(checkpoints[-1], folder / "cut", options.tp)
        except RuntimeError as problem:
            sys.stderr.write(f"checkpoints.py: error: {problem}\n")
            return 1
    print(f"checkpoint of {size:.2f} GB, median of {options.saves} saves of each kind, in turns")
    numbers = {
        temporary_dir: statistics.median(values)
        for temporary_dir, values in {**seconds_by_kind, **copies}.items()
        if values
    }
    for label, value in numbers.items():
        rate = f", {copied:.2f} GB, {copied / value:.2f} GB/s" if label in copies else ""
        print(f"{label:23} {value:8.3f} s{rate}")
    ratios = [ordinary / reused for ordinary, reused in zip(*copies.values(), strict=True)]
    print(f"{'ordinary / used again':23} {statistics.median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{'reshard to tensor ' + str(options.tp):23} {seconds:8.3f} s, {memory:.2f} GB of memory")
    if options.json:
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        other_numbers = {
            "checkpoint GB": size,
            "reshard": seconds,
            "reshard GB": memory,
            "peak GB of the run": peak_gb,
            "copied GB": copied,
        }
        options.json.write_text(json.dumps({**numbers, **other_numbers}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
