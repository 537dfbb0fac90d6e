"""Building a run, in order and once: groups, tokenizer, datasets, model, engine, then a checkpoint if there is one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist

from megatron.data import Datasets, build_datasets
from megatron.model import Stage, build_stage, init_stage
from megatron.mpu import ParallelGroups, Process, Watchdog, configure_logging, join, on_rank_zero
from megatron.neox_arguments import ConfigError, NeoXArgs, arguments_dump
from megatron.objectives import LANGUAGE_MODELLING
from megatron.tokenizer import Tokenizer, build_tokenizer, with_vocabulary
from megatron.training.checkpoints import Checkpointer, Progress
from megatron.training.deepspeed_config import zero_stage_used
from megatron.training.engine import Engine
from megatron.training.gate import check_deepspeed
from megatron.training.schedules import Schedule, build_schedule
from megatron.training.sources import adopt_vocabulary, choose_source


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
    watchdog: Watchdog

    def close(self) -> None:
        """Release the engine and leave the process group."""
        self.engine.close()
        self.groups.barrier()
        dist.destroy_process_group()
        self.watchdog.close()


def build_engine(args: NeoXArgs, groups: ParallelGroups, logger: logging.Logger | None = None) -> Engine:
    """A freshly initialised model under its engine; `args` knows its world and vocabulary."""
    say = logger.info if logger is not None else None
    stage: Stage = build_stage(args, groups, log=say)
    init_stage(stage, args, groups)
    if say is not None and zero_stage_used(args) != args.zero_stage:
        say("ZeRO 0 with pipelines or 16-bit weights runs on the stage-1 optimizer (same numbers)")
    return Engine(args, groups, stage, LANGUAGE_MODELLING)


def start(args: NeoXArgs, process: Process) -> Training:
    """Build a run up to its first step, on every rank."""
    check_deepspeed()
    logger = configure_logging(process.rank)
    args = args.check_training().for_world(process.world_size)
    watchdog = Watchdog(args, process.world_size, logger)
    groups = join(args, process, logger)
    if args.params_dtype == "fp16" and groups.device.type == "cpu":
        raise ConfigError(
            [f"{args.origin('precision')}: precision: fp16 needs a GPU; on CPU use --set precision=fp32 fp16=null"]
        )
    tokenizer = build_tokenizer(args)
    source = on_rank_zero(groups, lambda: choose_source(args))
    args = with_vocabulary(adopt_vocabulary(args, source, tokenizer.vocab_size), tokenizer)
    logger.info(arguments_dump(args))
    for note in args.notes():
        logger.info(note)
    watchdog.now("reading the data")
    datasets = build_datasets(
        args, train_batch_size=args.train_batch_size, once=lambda work: on_rank_zero(groups, work)
    )
    watchdog.now("building the model")
    engine = build_engine(args, groups, logger)
    schedule = build_schedule(args)
    order = datasets.train.order if datasets.train is not None else {}
    checkpointer = Checkpointer(args, groups, engine, schedule, tokenizer, order, source, logger)
    watchdog.now("loading a checkpoint")
    progress = checkpointer.resume()
    return Training(args, groups, tokenizer, datasets, engine, schedule, checkpointer, progress, logger, watchdog)
