"""Estimates what the runs of a sweep cost, by the plan of each on a named GPU, before they are started."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.experiments.sweep_file import Link, Sweep
from megatron.experiments.sweep_link import LinkWork
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.errors import UserError
from megatron.pipelines.digests import digest

# Keys that change what is trained, but not how long a step takes
_NO_TIME = {
    "train_iters", "seed", "data_seed", "min_lr", "warmup", "lr_decay_style", "lr_decay_iters", "lr_decay_fraction",
    "weight_decay", "gradient_clipping", "save", "load", "log_dir", "tensorboard_dir", "finetune", "load_ema",
    "data_path", "train_data_paths", "valid_data_paths", "test_data_paths", "split", "eval_interval",
    "eval_iters", "log_interval", "checkpoint_factor", "keep_last_n_checkpoints",
}  # fmt: skip


def cost_lines(sweep: Sweep, links: Sequence[Link], cwd: Path) -> Iterator[str]:
    """Yields the estimated GPU hours of each run, their sum, and prices; nothing if sweep.yml names no `gpu`.

    A run that cannot be planned is named with the reason, and is not in the sum.
    """
    if sweep.keys.gpu is None:
        return
    total, missing = 0.0, 0
    links = [link for link in links if link.stage is None or link.stage.kind == "train"]
    seconds: dict[str, float] = {}  # of a step, by digest of the keys on which it depends
    for link in links:
        try:
            work = LinkWork(sweep, link, cwd, print)
            args = work.args()
            with contextlib.chdir(work.folder()):
                key = digest(_step_keys(args))
                if key not in seconds:
                    seconds[key] = _step_seconds(args, sweep)
        except UserError as problem:
            missing += 1
            yield f"{link.name}: no estimate: {str(problem).splitlines()[0]}"
            continue
        hours = seconds[key] * (args.train_iters or 0) * sweep.keys.gpus / 3600
        total += hours
        yield f"{link.name}: {_hours(hours, sweep.keys.price)}"
    note = f", without {missing} that cannot be planned" if missing else ""
    yield f"{len(links)} runs on {sweep.keys.gpu}: {_hours(total, sweep.keys.price)}{note}"


def _hours(hours: float, price: float | None) -> str:
    return f"{hours:.3g} GPU hours" + (f", price {hours * price:.4g}" if price is not None else "")


def _step_keys(args: NeoXArgs) -> dict[str, Any]:
    keys = {name: value for name, value in args.user_values.items() if name not in _NO_TIME}
    optimizer = keys.pop("optimizer", None) or {}
    return {**keys, "optimizer": optimizer.get("type")}


def _step_seconds(args: NeoXArgs, sweep: Sweep) -> float:
    import argparse

    from megatron.planning.command import machine_of
    from megatron.planning.plan import make_plan
    from megatron.planning.processes import Processes

    gpus = sweep.keys.gpus
    machine = machine_of(argparse.Namespace(gpu=sweep.keys.gpu, net=None, gpus_per_node=min(8, gpus)))
    with Processes(os.cpu_count() or 1) as processes:
        plan = make_plan(
            args.check_planning(), gpus, machine, has_gpu=True, gpu_memory=None, price=None, failures=None,
            processes=processes, compares=False, finds_ways=False,
        )  # fmt: skip
    if plan.fits_memory is False:
        raise args.error("train_micro_batch_size_per_gpu", f"a step does not fit the memory of {sweep.keys.gpu}")
    assert plan.time is not None
    return plan.time.seconds
