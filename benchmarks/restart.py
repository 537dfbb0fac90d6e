"""Seconds from the kill of a rank to the next step of its run, with spares and without.

A small model trains on two ranks through `deepy.py --max-restarts`. Rank 1 is killed several times, each time
after a save and once its spare waits. Each way trains by itself; the ratio of both is of one machine.
"""

import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.stopping import DATA, MODEL  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.process.spare import WAITING  # noqa: E402

STEPS_PER_KILL = 30
# Of --share: a kill comes KILL_OFFSET steps after a validation, and is over STEPS_WATCHED new steps later.
STEPS_PER_FAULT, KILL_OFFSET, STEPS_WATCHED, LOCAL_SAVE_INTERVAL = 300, 10, 40, 5


def processes_of(launcher: int) -> tuple[dict[int, int], list[int]]:
    """Returns the process number of each rank, and those of spares that wait."""
    ranks: dict[int, int] = {}
    spares = []
    for text in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            match = re.search(rb"\0RANK=(\d+)", Path(f"/proc/{text}/environ").read_bytes())
        except OSError:  # it has ended, or is ending
            continue
        if match and Path(f"/proc/{text}/comm").read_text().strip() == WAITING:
            spares.append(int(text))
        elif match:
            ranks[int(match[1])] = int(text)
    return ranks, spares


@contextmanager
def _killed_on_error(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """Kills the process if the block raises, and waits for its end."""
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _memory_gb(pid: int) -> float:
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) / 1e6


def measure(folder: Path, kills: int, spare_ranks: bool) -> tuple[list[float], float]:
    """Returns the seconds from each kill to the next step, and the host memory of a spare in GB (0: none)."""
    save = folder / str(spare_ranks)
    keys = {"save": str(save), "load": str(save), "checkpoint_factor": 10, "max_restarts": kills, "log_interval": 1,
            "train_iters": 1_000_000, "spare_ranks": spare_ranks, "hidden_size": 64,
            "seq_length": 64, "max_position_embeddings": 64}  # fmt: skip
    (folder / "run.yml").write_text(json.dumps({**MODEL, **keys}))
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", "2", "train.py", str(folder / "run.yml")]
    seconds, memory, num_steps = [], 0.0, 0
    killed_at: float | None = None
    with _killed_on_error(
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not re.search(r"iteration +\d+/", line):
                continue
            num_steps += 1
            if killed_at is not None:
                seconds.append(time.monotonic() - killed_at)
                killed_at, num_steps = None, 1
                if len(seconds) == kills:
                    process.send_signal(signal.SIGUSR1)
            if num_steps < STEPS_PER_KILL or killed_at is not None or len(seconds) == kills:
                continue
            ranks, spares = processes_of(process.pid)
            if not spare_ranks or len(spares) == len(ranks):
                memory = max((_memory_gb(pid) for pid in spares), default=0.0)
                os.kill(ranks[1], signal.SIGKILL)
                killed_at = time.monotonic()
    if process.returncode != 0 or len(seconds) != kills:
        sys.exit(f"restart.py: the run ended with code {process.returncode} after {len(seconds)} restarts")
    return seconds, memory


def times_of_run(folder: Path, kills: int) -> tuple[list[float], str]:
    """Returns when a run of the quickstart model ended each step at first, and the last line of deepy.py.

    Its rank is killed every STEPS_PER_FAULT steps. It keeps its last steps in memory (`local_save`).
    """
    steps = STEPS_PER_FAULT * kills + KILL_OFFSET + STEPS_WATCHED
    save, memory = folder / "run", Path("/dev/shm") / f"neox_{os.getpid()}"
    keys = {"save": str(save), "load": str(save), "tensorboard_dir": None, "log_interval": 1, "train_iters": steps,
            "max_restarts": kills, "local_save": str(memory), "local_save_interval": LOCAL_SAVE_INTERVAL}  # fmt: skip
    configs = ["configs/quickstart.yml", "configs/local_setup.yml"]
    settings = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", "1", "train.py", *configs, "--set", *settings]
    times: list[float] = []
    last_line, kills_so_far = "", 0
    try:
        with _killed_on_error(
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last_line = line.strip() or last_line
                match = re.search(r"iteration +(\d+)/", line)
                if not match or int(match[1]) <= len(times):  # or a step once more
                    continue
                times.append(time.monotonic())
                if kills_so_far < kills and len(times) == STEPS_PER_FAULT * (kills_so_far + 1) + KILL_OFFSET:
                    os.kill(processes_of(process.pid)[0][0], signal.SIGKILL)
                    kills_so_far += 1
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    if process.returncode != 0:
        sys.exit(f"restart.py: the run ended with code {process.returncode}: {last_line}")
    return times, last_line


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="restarts of each way (default: 3)")
    parser.add_argument(
        "--share",
        action="store_true",
        help=f"instead kill the quickstart model every {STEPS_PER_FAULT} steps, and print the share of its time that "
        "its steps took",
    )
    options = parser.parse_args()
    subprocess.run([sys.executable, "tools/quickstart_data.py"], cwd=ROOT, check=True)
    assert DATA.exists()
    if options.share:
        with tempfile.TemporaryDirectory() as folder:
            times, last_line = times_of_run(Path(folder), options.kills)
        killed = [STEPS_PER_FAULT * (kill + 1) + KILL_OFFSET for kill in range(options.kills)]
        spans = [times[step + STEPS_WATCHED - 1] - times[step - 1] for step in killed]
        useful = times[killed[0] - 1] - times[killed[0] - 1 - STEPS_PER_FAULT]  # with its validations and saves
        step_seconds = [
            end_time - start_time
            for start_time, end_time in itertools.pairwise(times[killed[0] - STEPS_PER_FAULT : killed[0]])
        ]
        undisturbed = STEPS_WATCHED * statistics.median(step_seconds)
        lost = [span - undisturbed for span in spans]
        print(last_line)
        print(f"{STEPS_WATCHED} steps take {undisturbed:.1f} s, after a kill {', '.join(f'{s:.1f}' for s in spans)} s")
        print(
            f"{STEPS_PER_FAULT} steps take {useful:.1f} s, and a kill loses {statistics.mean(lost):.1f} s: effective "
            f"time {useful / (useful + statistics.mean(lost)):.1%}"
        )
        return 0
    medians = []
    print("| ranks after a kill | seconds to the next step: median (least to most) | memory of a spare (GB) |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for spare_ranks, name in ((True, "spares"), (False, "new processes")):
            seconds, memory = measure(Path(folder), options.kills, spare_ranks)
            medians.append(statistics.median(seconds))
            spread = f"{medians[-1]:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
            print(f"| {name} | {spread} | {memory and f'{memory:.2f}'} |", flush=True)
    print(f"\nspares: {medians[1] / medians[0]:.1f} times as fast")
    return 0


if __name__ == "__main__":
    run_command(main)
