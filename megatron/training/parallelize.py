"""What is done to a freshly built stage before it trains, in one place and in this order."""

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
    """The order of forwards and backwards over pipeline stages; none where there is one stage."""
    return "1F1B" if groups.size("pipe") > 1 else "none"


def parallelize(
    stage: Stage,
    objective: Objective,
    args: NeoXArgs,
    groups: ParallelGroups,
    engine: type[Engine],
    log: Callable[[str], None] | None = None,
) -> Engine:
    """Freeze a stage, quantise what lies below adapters, give it FP8 (of `auto` where a trial finds it
    faster: the engine's `args` have its choice), pipeline its tensor parallelism,
    recompute and compile it, give it the norms of a package that was asked for, and build the engine around
    it, which gives it memory; the stage was cut over tensor and pipeline ranks when it was built. log: takes
    what was chosen, a line each.

    Raises ConfigError where blocks are to be compiled and there is no compiler, and for FP8 and asynchronous
    tensor parallelism that the device does not have.
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
