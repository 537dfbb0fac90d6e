"""Where a run asks its teacher: in every step, or before the first one."""

import logging

from megatron.data import Datasets
from megatron.distributed import Watchdog
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process import StopRequested
from megatron.tokenizer import Tokenizer
from megatron.training.distillation.cache import TeacherCache
from megatron.training.distillation.description import TeacherDescription
from megatron.training.distillation.teacher import Teacher
from megatron.training.engine import Engine


def with_teacher(
    args: NeoXArgs,
    groups: ParallelGroups,
    description: TeacherDescription,
    engine: Engine,
    datasets: Datasets,
    tokenizer: Tokenizer,
    logger: logging.Logger,
    watchdog: Watchdog,
) -> Datasets:
    """The datasets, with what the teacher says of them (`cache`); else the engine asks it in each step. All
    ranks call it together."""
    assert args.distillation is not None
    if args.distillation["cache"]:
        try:
            return TeacherCache(args, groups, description, tokenizer, logger, watchdog).fill(datasets)
        except StopRequested as stop:  # the run ends before its first step
            logger.info(f"distillation: given up, {stop} ends the run; scored rows are kept for the next start")
            return datasets
    engine.use_reference(Teacher(args, description, groups, logger).fill)
    return datasets
