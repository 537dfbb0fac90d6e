"""What is done to a freshly built stage before it trains, in one place and in this order."""

import os
import shutil

import torch

from megatron.model import Stage, freeze
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.training.engine import Engine, PipelineSchedule


def choose_schedule(groups: ParallelGroups) -> PipelineSchedule:
    """The order of forwards and backwards over pipeline stages; none where there is one stage."""
    return "1F1B" if groups.size("pipe") > 1 else "none"


def parallelize(
    stage: Stage, objective: Objective, args: NeoXArgs, groups: ParallelGroups, engine: type[Engine]
) -> Engine:
    """Freeze, recompute and compile a stage, and build the engine around it, which gives it memory; the stage
    was cut over tensor and pipeline ranks when it was built.

    Raises ConfigError where blocks are to be compiled and there is no compiler.
    """
    freeze(stage_parameters(stage), args)
    recompute_blocks(stage, args)
    compile_blocks(stage, args)
    # Memory and precision, sharding over data ranks, and 1F1B around the stage, are the engine's.
    return engine(args, groups, stage, objective, choose_schedule(groups))


def recompute_blocks(stage: Stage, args: NeoXArgs) -> None:
    """Make activations again in the backward pass, so many blocks together."""
    stage.recompute = args.checkpoint_num_layers if args.checkpoint_activations else 0
    stage.recompute_from_cpu = args.checkpoint_in_cpu


def compile_blocks(stage: Stage, args: NeoXArgs) -> None:
    """`compile`, each block by itself."""
    if not args.compile:
        return
    _check_compiler(args, stage.device_of_groups)
    stage.compiled = True
    for spec in stage.blocks:
        stage.layers[str(spec.index)].compile()


def _check_compiler(args: NeoXArgs, device: torch.device) -> None:
    # torch.compile would only say so in the first step. On a GPU it is Triton that compiles its launchers.
    names = [os.environ.get("CXX", "g++")] if device.type == "cpu" else [os.environ.get("CC", "gcc"), "clang"]
    if not any(shutil.which(name) for name in names):
        needed = f"{args.compile} needs {' or '.join(names)}, not found on the PATH; set compile: false"
        raise args.error("compile", needed)
