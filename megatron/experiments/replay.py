"""The losses of a past step's tokens, by the run's own engine and objective, before the step's update."""

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.layout import is_tag, step_of, step_tag
from megatron.distributed import Process, run_on_all_ranks
from megatron.experiments.errors import RunError
from megatron.experiments.run import Run
from megatron.experiments.run_data import (
    ONE_RANK,
    check_samples,
    index_cache,
    samples_of_rank,
    with_epochs,
    with_tokenizer,
    without_world,
)
from megatron.neox_arguments import NeoXArgs
from megatron.training import start
from megatron.training.checkpoint.same_run import begun_of
from megatron.training.loop import steps_of
from megatron.training.method import find_method

_NOT_SAVING: Mapping[str, Any] = {
    "save": None, "restart": False, "finetune": False, "local_save": None, "local_save_interval": 0, "save_hf": None,
    "save_best": None, "push_to_hub": False, "demo_prompts": None, "on_out_of_memory": "stop", "callbacks": None,
    "log_spikes_above_sigma": None, "no_load_optim": True, "no_load_rng": True,
    "checkpoint_validation_with_forward_pass": False,
}  # fmt: skip
"""Keys of a start that reads weights and saves nothing."""


@dataclass(frozen=True)
class TokenLosses:
    """The losses of a step's tokens under the weights of a checkpoint.

    mean: of the step, as training computes it. logged: the value in metrics.jsonl; None: it has none of this
    step alone. checkpoint: the folder of the weights; has_weights: they are those that took the step.
    rows: {sample: (loss of each label in nats `[length]`, its weight `[length]`)}.
    is_exact: weights and order of sums are those of training, so `mean` has the bits of `logged`. On another
        kind of device the last bits differ all the same.
    """

    mean: float
    logged: float | None
    checkpoint: Path
    has_weights: bool
    rows: Mapping[int, tuple[np.ndarray, np.ndarray]]
    is_exact: bool


def token_losses(run: Run, step: int, process: Process, checkpoint: str | None = None) -> TokenLosses:
    """Returns the losses of a step's tokens before its update. All ranks call it together.

    With as many ranks as the run had, the layout is the run's. Other ranks keep the run's model-parallel
    sizes if they can be divided by them, else each has the whole model. A single rank adds up the losses of a
    run with data parallelism alone in that run's order.
    checkpoint: a step, or a folder global_stepN; None: the last one before the step.
    """
    span, (load, weights) = run.span_of(step), _weights(run, step, checkpoint)
    saved, manifest = run.args_at(span.checkpoint), run.manifest(span.checkpoint)
    is_same = process.world_size == manifest.layout.world_size
    sums_by_rank = process.world_size == 1 and saved.data_parallel_size == manifest.layout.world_size
    args = with_tokenizer(without_world(with_epochs(saved, manifest)), run.checkpoints[span.checkpoint])
    args = args.replace(**_NOT_SAVING, load=str(load), iteration=weights, index_cache_dir=index_cache(run, saved))
    if load == run.path:
        args = args.replace(branched_from=None)  # which a start compares with the parent's checkpoint
    if not is_same:
        args = _in_other_layout(args, saved, process.world_size)
    with redirect_stdout(io.StringIO()):  # the log of a start
        training = start(args, process, laid_out=begun_of(manifest, find_method(args)))
    try:
        samples, groups, engine = span.samples(step), training.groups, training.engine
        check_samples(run, step, samples, training.datasets.train)
        training.progress.iteration, training.progress.consumed_samples = step - 1, samples.start
        batches = next(steps_of(training)).take()
        values = engine.step_losses(batches)
        sums = [values[0].new_zeros(()) for _ in range(saved.data_parallel_size if sums_by_rank else 1)]
        for number, value in enumerate(values):
            sums[number % len(sums)] += value[0]
        local = torch.stack(sums).div(engine.loss_factor(len(batches))).unbind()
        total = groups.sum(reduce(torch.add, local), "data")
        rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        numbers_of = samples_of_rank(training.args, samples, groups.rank("data"))
        for numbers, value, batch in zip(numbers_of, values, batches, strict=True):
            losses = -value[1:].double().cpu().reshape(len(numbers), -1).numpy()
            label_weights = batch.loss_weights.cpu().reshape(len(numbers), -1).numpy()
            rows |= dict(zip(numbers, zip(losses, label_weights, strict=True), strict=True))
        everyone = run_on_all_ranks(groups, lambda: rows)
    finally:
        training.close()
    has_weights = load == run.path and weights == step - 1
    has_order = is_same or (sums_by_rank and saved.data_parallel_size <= 2)
    is_exact = has_weights and has_order and not saved.compile and step not in run.split_steps
    all_rows = {sample: row for share in everyone for sample, row in share.items()}
    place = load / step_tag(weights)
    return TokenLosses(float(total), _logged(run, step, saved), place, has_weights, all_rows, is_exact)


def _weights(run: Run, step: int, checkpoint: str | None) -> tuple[Path, int]:
    """Returns (folder of checkpoints, step of the chosen one). Raises RunError if there is none."""
    if checkpoint is None:
        return run.path, run.weights_before(step)
    if checkpoint.isdecimal():
        if int(checkpoint) not in run.checkpoints:
            saved = ", ".join(map(str, run.checkpoints))
            raise RunError(f"--checkpoint {checkpoint}: {run.path} holds the steps {saved}; take one of them")
        return run.path, int(checkpoint)
    path = Path(checkpoint)
    if not path.is_dir() or not is_tag(path.name):
        raise RunError(f"--checkpoint {checkpoint}: is neither a step nor a folder global_stepN; give one")
    return path.parent, step_of(path)


def _in_other_layout(args: NeoXArgs, saved: NeoXArgs, ranks: int) -> NeoXArgs:
    """Returns the configuration for another number of ranks, with the same batch.

    Micro-batches stay the same if the ranks can share them evenly.
    """
    replica, rows = saved.pp * saved.tp * saved.context_parallel_size, saved.train_micro_batch_size_per_gpu
    if ranks % replica or ranks // (saved.pp * saved.tp) % saved.expert_parallel_size:
        args, replica = args.replace(**ONE_RANK), 1
    divides = saved.train_batch_size % (rows * (ranks // replica)) == 0
    return args.replace(
        train_batch_size=saved.train_batch_size, train_micro_batch_size_per_gpu=rows if divides else None,
        gradient_accumulation_steps=None,
    )  # fmt: skip


def _logged(run: Run, step: int, args: NeoXArgs) -> float | None:
    """Returns the loss of a step in metrics.jsonl; None if no row is of this step alone."""
    if args.log_interval != 1:
        return None
    return next((row.get("train/lm_loss") for row in reversed(run.metrics) if row["iteration"] == step), None)
