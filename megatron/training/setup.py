"""Building a run, in order and once: groups, tokenizer, datasets, model, engine, then a checkpoint if there is one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist

from megatron.data import Datasets, build_datasets
from megatron.model import Stage, build_stage, init_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs, arguments_dump
from megatron.objectives import language_modelling
from megatron.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.training.checkpoints import Checkpointer, Progress
from megatron.training.distributed import Process, configure_logging, join
from megatron.training.engine import Engine, zero_stage_used
from megatron.training.gate import check_deepspeed
from megatron.training.schedules import Schedule, build_schedule


@dataclass(frozen=True)
class Training:
    """Everything a training run is made of."""

    args: NeoXArgs
    groups: ParallelGroups
    tokenizer: Tokenizer
    datasets: Datasets
    engine: Engine
    schedule: Schedule
    checkpointer: Checkpointer
    progress: Progress
    logger: logging.Logger

    def close(self) -> None:
        """Release the engine and leave the process group."""
        self.engine.close()
        self.groups.barrier()
        dist.destroy_process_group()


def with_vocabulary(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """The configuration with `padded_vocab_size` known. Raises ConfigError when a given one is too small."""
    if args.padded_vocab_size is None:
        padded = padded_vocab_size(tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tp)
        return args.replace(padded_vocab_size=padded)
    if args.padded_vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            [
                f"{args.origin('padded_vocab_size')}: padded_vocab_size: {args.padded_vocab_size} is smaller than the "
                f"tokenizer's vocabulary of {tokenizer.vocab_size}"
            ]
        )
    return args


def build_engine(args: NeoXArgs, groups: ParallelGroups, logger: logging.Logger | None = None) -> Engine:
    """A freshly initialised model under its engine; `args` knows its world and vocabulary."""
    say = logger.info if logger is not None else None
    stage: Stage = build_stage(args, groups, log=say)
    init_stage(stage, args, groups)
    if say is not None and zero_stage_used(args) != args.zero_stage:
        say("ZeRO 0 with pipelines or 16-bit weights runs on the stage-1 optimizer (same numbers)")
    return Engine(args, groups, stage, language_modelling)


def start(args: NeoXArgs, process: Process) -> Training:
    """Build a run up to its first step, on every rank."""
    check_deepspeed()
    logger = configure_logging(process.rank)
    args = args.check_training().for_world(process.world_size)
    groups = join(args, process, logger)
    tokenizer = build_tokenizer(args)
    args = with_vocabulary(args, tokenizer)
    logger.info(arguments_dump(args))
    for note in args.notes():
        logger.info(note)
    assert args.train_batch_size is not None
    datasets = build_datasets(
        args, train_batch_size=args.train_batch_size, build=groups.world_rank == 0, barrier=groups.barrier
    )
    engine = build_engine(args, groups, logger)
    schedule = build_schedule(args)
    checkpointer = Checkpointer(args, groups, engine, schedule, tokenizer, logger)
    progress = checkpointer.resume()
    return Training(args, groups, tokenizer, datasets, engine, schedule, checkpointer, progress, logger)
