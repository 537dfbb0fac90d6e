"""The training loop: steps, and callbacks asked at the end of each: log, validate, write metrics, save."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tqdm import tqdm

from megatron.data import Batch, train_loader
from megatron.training.callbacks import LogCallback, SaveCallback, Step, Stopwatch, ValidationCallback, validate
from megatron.training.loggers import Row, build_loggers
from megatron.training.setup import Training


def batches_of(training: Training) -> Iterator[list[Batch]]:
    """The optimizer steps still to do, as lists of this rank's micro-batches."""
    assert training.datasets.train is not None
    return train_loader(
        training.datasets.train,
        training.args,
        data_rank=training.groups.rank("data"),
        data_size=training.groups.size("data"),
        consumed_samples=training.progress.consumed_samples,
        eod=training.tokenizer.eod,
        pin_memory=training.groups.device.type == "cuda",
    )


def train(training: Training) -> None:
    """Train to `train_iters`: log, validate and save on the way, validate, test and save at the end."""
    args, progress, logger = training.args, training.progress, training.logger
    is_chief = training.groups.world_rank == 0
    if progress.iteration >= args.train_iters:
        logger.info(f"nothing left to do: train_iters is {args.train_iters}")
        logger.info(f"run finished at iteration {progress.iteration}")
        return
    loggers = build_loggers(args, progress.iteration) if is_chief else []

    def write(row: Row) -> None:
        if len(row) > 3:  # more than where we are
            for target in loggers:
                target.write(row)

    save = SaveCallback(training)
    bar = tqdm(
        total=args.train_iters, initial=progress.iteration, unit="step", file=sys.stderr,
        disable=not (is_chief and sys.stderr.isatty()), dynamic_ncols=True,
    )  # fmt: skip
    if progress.iteration == 0:
        step = Step(0, 0, 0, None)
        validate(training, "valid", 0, step.row, bar)
        write(step.row)
        save.at_start()
    batches = batches_of(training)
    stopwatch = Stopwatch()
    log, validation = LogCallback(training, bar, stopwatch), ValidationCallback(training, bar)
    try:
        while progress.iteration < args.train_iters:
            result = training.engine.train_step(next(batches), training.schedule(progress.iteration))
            progress.iteration += 1
            progress.consumed_samples += args.train_batch_size
            progress.skipped += int(result.skipped)
            tokens = progress.consumed_samples * args.seq_length
            step = Step(progress.iteration, progress.consumed_samples, tokens, result)
            log.on_step_end(step)
            with stopwatch.pause():
                validation.on_step_end(step)
                write(step.row)
                save.on_step_end(step)
            bar.update()
    finally:
        bar.close()
        for target in loggers:
            target.close()
    logger.info(f"run finished at iteration {progress.iteration}")
