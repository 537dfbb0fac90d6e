"""Prepares a freshly built stage for training, in one place and in a fixed order."""

from collections.abc import Callable

from megatron.model import Stage, freeze
from megatron.model.init import stage_parameters
from megatron.model.quantized import quantize_base
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.training.apex import use_apex_norms
from megatron.training.async_tensor_parallel import use_async_tensor_parallel
from megatron.training.compile_blocks import compile_blocks
from megatron.training.engine import Engine, PipelineSchedule
from megatron.training.fp8 import use_fp8
from megatron.training.precision_policy import choose_precision
from megatron.training.precision_trial import settle_precision
from megatron.training.recompute import recompute_blocks
from megatron.training.transformer_engine import use_transformer_engine_norms


def choose_schedule(groups: ParallelGroups) -> PipelineSchedule:
    """Returns the order of forwards and backwards over pipeline stages; none where there is one stage."""
    return "1F1B" if groups.size("pipe") > 1 else "none"


def parallelize(
    stage: Stage,
    objective: Objective,
    args: NeoXArgs,
    groups: ParallelGroups,
    engine: type[Engine],
    log: Callable[[str], None] | None = None,
) -> Engine:
    """Prepare a stage for training and return the engine built around it, which gives it memory.

    The stage was sharded over tensor and pipeline ranks when it was built. The steps, in order: freeze,
    quantise the weights below adapters, use FP8, overlap tensor-parallel communication, recompute, compile,
    and use a package's norms. With `precision_fp8: auto` a trial decides on FP8; the engine's `args` have its
    choice. log: takes one line for each choice.

    Raises ConfigError if blocks are to be compiled and there is no compiler, or if the device lacks FP8 or
    asynchronous tensor parallelism that a key requires.
    """
    freeze(stage_parameters(stage), args)
    say = log or (lambda line: None)
    args = settle_precision(stage, args, groups, choose_precision(args, groups.device), say)
    precision = choose_precision(args, groups.device)
    quantize_base(stage, args, say)
    use_fp8(stage, precision, args, groups, say)
    use_async_tensor_parallel(stage, args, groups, say)
    recompute_blocks(stage, args)
    compile_blocks(stage, args)
    use_transformer_engine_norms(stage, args, precision.recipe, log)
    use_apex_norms(stage, args, engine.name, log)
    # Memory and precision, sharding over data ranks, and 1F1B around the stage, are the engine's.
    return engine(args, groups, stage, objective, choose_schedule(groups))
