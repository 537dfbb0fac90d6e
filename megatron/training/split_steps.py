"""Takes a step that ran out of memory again, in smaller micro-batches (`on_out_of_memory: split`).

A rank that runs out of memory has left its collectives, so no rank can finish the step. The rank writes the
step's number into `save` and ends. The next start takes this step in smaller micro-batches on all ranks.
"""

import json
import os
from pathlib import Path
from typing import Any

from megatron.checkpointing import list_checkpoints
from megatron.distributed import on_rank_zero
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.frozen import FrozenDict
from megatron.process.run_files import Problems, Shape, count, list_of, read_fields, text
from megatron.training.out_of_memory import OutOfMemoryError
from megatron.training.run import Training

FILE = "split_steps.json"
_SHAPE: Shape = FrozenDict({"run_id": text, "steps": list_of(count)})


class SplitStepError(OutOfMemoryError):
    """Raised if a step ran out of memory that the next start takes in smaller micro-batches.

    The same command goes on, so the exit code is not that of a refusal.
    """

    exit_code = 75  # EX_TEMPFAIL: temporary failure


def pieces(args: NeoXArgs) -> int:
    """Returns the number of equal pieces into which a micro-batch is split; 1: it has a single row."""
    rows = args.train_micro_batch_size_per_gpu or 1
    return 2 if rows % 2 == 0 else rows


def read_split_steps(training: Training) -> frozenset[int]:
    """Returns the steps of this run that are taken in smaller micro-batches. All ranks call it together."""

    def read() -> frozenset[int]:
        steps = _read(training)
        if steps:  # a run that began anew has another id now
            _write(training, steps)
        return frozenset(steps)

    steps = on_rank_zero(training.groups, read)
    if coming := sorted(step for step in steps if step > training.iteration):
        names = ", ".join(map(str, coming))
        training.logger.info(
            f"on_out_of_memory: steps taken in {pieces(training.args)} times as many micro-batches: {names}"
        )
    return steps


def after_out_of_memory(training: Training, problem: OutOfMemoryError) -> OutOfMemoryError:
    """Notes that the present step is to be split, and returns the exception with which this rank ends.

    Returns `problem` if no step is under way, if its micro-batches have single rows, or if it was split
    already.
    """
    args, step = training.args, training.loop.step_under_way
    if args.on_out_of_memory == "stop" or step is None or args.save_dir is None or pieces(args) == 1:
        return problem
    if step in training.loop.split_steps:
        return OutOfMemoryError(f"{problem}\non_out_of_memory: step {step} was split already, so the run ends")
    steps = sorted({*_read(training), step})
    try:
        _write(training, steps)
    except OSError as failure:
        return OutOfMemoryError(f"{problem}\non_out_of_memory: {args.save_dir}/{FILE}: {failure.strerror}")
    rows = (args.train_micro_batch_size_per_gpu or 1) // pieces(args)
    return SplitStepError(
        f"{problem}\non_out_of_memory: the next start takes step {step} in {pieces(args)} times as many micro-batches, "
        f"of {rows} row{'s' * (rows > 1)}"
    )


def read_split_file(save: str | Path, problems: Problems) -> dict[str, Any]:
    """Returns `run_id` and split `steps` of the run in the folder `save`; {} if it has split none."""
    return read_fields(Path(save) / FILE, _SHAPE, problems)


def _read(training: Training) -> list[int]:
    problems = Problems()
    saved = read_split_file(training.args.save_dir or "", problems)
    for line in problems.lines():
        training.logger.warning(line)
    is_of_this_run = saved.get("run_id") == training.run_id or not list_checkpoints(training.args.save_dir or "")
    return saved.get("steps") or [] if is_of_this_run else []


def _write(training: Training, steps: list[int]) -> None:
    draft = Path(training.args.save_dir or "") / f".{FILE}_{training.groups.world_rank}"  # several ranks may write
    draft.write_text(json.dumps({"run_id": training.run_id, "steps": steps}))
    os.replace(draft, draft.with_name(FILE))
