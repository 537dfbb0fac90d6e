#!/usr/bin/env python
"""Shows the peak memory of a training step by part as a table, and its course over the step as a plot.

The parts are weights, gradients, optimizer states, buffers, activations, logits and all other memory.

    python tools/profile_memory.py model.yml local_setup.yml                      # measures a run of 3 steps
    python tools/profile_memory.py model.yml --set train_micro_batch_size_per_gpu=8 checkpoint_activations=true
    python tools/profile_memory.py checkpoints/mine                               # shows a run with profile_memory: N
    python tools/profile_memory.py checkpoints/mine --json

Given configuration files, it runs deepy.py train.py for --iterations steps (3) on the configuration's data
and devices, and measures the last step. Weights are random, nothing is validated or saved, and all files go
into a temporary folder. --set has priority over these settings too (for example --set load=checkpoints/base).

Given the `save` or log folder of a run, it shows memory_parts.json, which the run wrote at the iteration that
its key `profile_memory` names. The run may still be going on.

The size of a part is the sum of its tensors' storages. On a GPU the peak is the allocator's; memory that no
part counts is a part of its own. With `compile` this part contains most of what compiled blocks save for
backward; --set compile=false shows more detail, but the peak differs.
"""  # noqa: W505 (lines to copy)

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.neox_arguments.values.local_paths import with_home  # noqa: E402
from megatron.operations.memory_parts import memory_file, plot, read_memory, table  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.process.metrics_file import MEMORY_FILE  # noqa: E402

# A run of three steps must not load weights, validate, save, report to trackers, or write outside its folder.
QUIET: Mapping[str, str] = {
    "load": "null",
    "save": "null",
    "iteration": "null",
    "checkpoint_factor": "null",
    "extra_save_iters": "null",
    "save_interval_in_mins": "null",
    "ephemeral_save_interval": "null",
    "local_save": "null",
    "local_save_interval": "0",
    "on_out_of_memory": "stop",
    "save_hf": "null",
    "save_best": "null",
    "push_to_hub": "false",
    "report": "false",
    "callbacks": "[]",
    "train_epochs": "null",
    "lr_decay_style": "constant",
    "lr_decay_iters": "null",
    "warmup": "0.0",
    "warmup_iters": "null",
    "exit_interval": "null",
    "max_restarts": "0",
    "eval_iters": "0",
    "eval_tasks": "null",
    "demo_prompts": "null",
    "tensorboard_dir": "null",
    "use_wandb": "false",
    "use_comet": "false",
    "profile": "false",
    "memory_profiling": "false",
    "reference_cache_dir": "null",
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "what", nargs="+", metavar="CONF.yml|FOLDER", help="configuration files, or the folder of one run"
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="keys with priority over the files"
    )
    parser.add_argument("--iterations", type=int, default=3, metavar="N", help="steps of the measured run (default: 3)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"picture to write (default: {Path(MEMORY_FILE).stem}.png in the run's log folder, or in this folder)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the numbers as JSON; write a picture only with --output"
    )
    options = parser.parse_args(argv)
    if options.iterations < 2:
        parser.error("--iterations must be at least 2, because the first step allocates the optimizer states")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    first_path = with_home(options.what[0])
    is_run = first_path.is_dir() or first_path.name == MEMORY_FILE
    try:
        if is_run and (len(options.what) > 1 or options.set):
            raise UserError(f"{first_path}: is the folder of a run; give it alone, without --set and other files")
        if is_run:
            file = memory_file(first_path)
            memory, picture_dir = read_memory(file), file.parent
        else:
            memory, picture_dir = measure(options.what, options.set, options.iterations), Path()
        picture = options.output or (None if options.json else picture_dir / f"{Path(MEMORY_FILE).stem}.png")
        print(json.dumps(memory) if options.json else table(memory))
        if picture is not None:
            plot(memory, picture)
            sys.stderr.write(f"wrote the picture: {picture}\n")
    except (UserError, OSError, ValueError) as problem:
        sys.stderr.write(f"profile_memory.py: {problem}\n")
        return 1
    return 0


def measure(configuration: Sequence[str], overrides: Sequence[str], iterations: int) -> dict[str, Any]:
    """Trains a configuration for a few steps, and returns the memory of the last step by part.

    The result is the content of memory_parts.json. overrides: KEY=VALUE of --set. Raises UserError if the run
    fails.
    """
    with tempfile.TemporaryDirectory(prefix="profile-memory-") as folder:
        steps = str(iterations)
        places = {"log_dir": f"{folder}/logs", "index_cache_dir": f"{folder}/index_cache"}
        settings = {**QUIET, **places, "train_iters": steps, "profile_memory": steps}
        overridden_keys = {word.partition("=")[0] for word in overrides}
        words = [f"{key}={value}" for key, value in settings.items() if key not in overridden_keys]
        command = [
            sys.executable,
            str(ROOT / "deepy.py"),
            str(ROOT / "train.py"),
            *configuration,
            "--set",
            *words,
            *overrides,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            lines = done.stdout.strip().splitlines()
            error_lines = [line for line in lines if ": error: " in line and "its output is above" not in line]
            raise UserError("\n".join(error_lines or [f"the run ended with {done.returncode}; its log:", *lines[-15:]]))
        file = Path(folder) / "logs" / MEMORY_FILE
        if not file.is_file():
            raise UserError(
                f"{configuration[0]}: the run wrote no {MEMORY_FILE} on this machine, perhaps because rank 0 ran on "
                "another; set profile_memory in a run of your own, and give this command the run's folder"
            )
        return read_memory(file)


if __name__ == "__main__":
    run_command(main)
