"""Prepares a freshly built stage for training, in one place and in a fixed order."""

import os
from collections.abc import Callable
from itertools import permutations

import torch

from megatron.model import Stage, freeze
from megatron.model.init import stage_parameters
from megatron.model.moe.experts import Experts
from megatron.model.quantized import quantize_base
from megatron.mpu import Linear, ParallelGroups
from megatron.mpu.deferred import DeferredGradients
from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.mpu.products import DeferredProduct
from megatron.mpu.torch_versions import enable_symmetric_memory
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.objectives import Objective
from megatron.training.apex import use_apex_norms
from megatron.training.compile_blocks import compile_blocks
from megatron.training.engine import Engine
from megatron.training.fp8 import use_fp8
from megatron.training.precision_policy import choose_precision
from megatron.training.precision_trial import settle_precision
from megatron.training.qat import use_qat
from megatron.training.recompute import recompute_blocks
from megatron.training.transformer_engine import use_transformer_engine_norms

MIN_CAPABILITY = (8, 0)  # for `async_tensor_parallel`: torch's own tests of its kernels require this capability


def parallelize(
    stage: Stage,
    objective: Objective,
    args: NeoXArgs,
    groups: ParallelGroups,
    engine: type[Engine],
    log: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Prepare a stage for training, and return the engine built around it, which allocates its weights.

    The stage is already sharded over tensor and pipeline ranks. In this order: freeze parameters, quantize
    the base weights of adapters, choose and use FP8, round weights for `qat`, overlap tensor-parallel
    communication, let weight gradients be deferred, recompute, compile, and use another package's norms. The
    engine's `args` hold the choice that a trial makes for `precision_fp8: auto`.
    log: takes one line for each choice.

    Raises ConfigError if blocks are to be compiled but there is no compiler, or if the device lacks FP8 or
    asynchronous tensor parallelism that a key requires.
    """
    freeze(stage_parameters(stage), args)
    args = settle_precision(stage, args, groups, choose_precision(args, groups.device), log)
    precision = choose_precision(args, groups.device)
    quantize_base(stage, args, log)
    use_fp8(stage, precision, args, groups, log)
    use_qat(stage, args, log)
    use_async_tensor_parallel(stage, args, groups, log)
    defer_weight_gradients(stage, args)
    recompute_blocks(stage, args)
    compile_blocks(stage, args)
    use_transformer_engine_norms(stage, args, precision.recipe, log)
    use_apex_norms(stage, args, engine.name, log)
    # The engine itself handles memory, precision, sharding over data ranks, and pipeline schedules.
    return engine(args, groups, stage, objective)


def defer_weight_gradients(stage: Stage, args: ModelArgs) -> None:
    """If the pipeline schedule defers weight gradients, let the blocks' linears and experts leave theirs for
    later.

    Replicated linears do not: under sequence parallelism autograd sums their gradients over tensor ranks.
    """
    if not args.defers_weight_gradients:
        return
    stage.deferred = DeferredGradients()
    for module in (m for spec in stage.blocks for m in stage.layers[str(spec.index)].modules()):
        if isinstance(module, Linear) and module.weight.requires_grad and module.replica_group is None:
            module.product = DeferredProduct(module.product, module, stage.deferred)
        elif isinstance(module, Experts):
            module.deferred = stage.deferred


def use_async_tensor_parallel(
    stage: Stage, args: ModelArgs, groups: ParallelGroups, log: Callable[[str], None]
) -> None:
    """If `async_tensor_parallel` is on, make linears overlap sequence-parallel communication with their
    products.

    Both are split into pieces: one piece is sent by torch's symmetric memory while another is multiplied. The
    choice of `auto` is logged, and equal on all tensor ranks.
    Raises ConfigError if the key is true and a requirement is not met.
    """
    setting, group = args.async_tensor_parallel, groups.group("tensor")
    if setting is False:
        return
    problem = missing_requirement(args.sequence_parallel and group is not None, groups)
    if args.defers_weight_gradients:
        problem = f"both gradients of a linear at once, unlike pipeline_schedule {args.cite('pipeline_schedule')}"
    if args.quantized:
        problem = f"weights that are not packed (lora.quantization, {args.origin('lora.quantization')})"
    if problem is not None and setting is True:
        raise args.error("async_tensor_parallel", f"true needs {problem}; write auto or false")
    if setting == "auto":
        reason = "the tensor ranks reach each other's memory" if problem is None else f"it would need {problem}"
        if problem is None:
            problem = not_run_on("async_tensor_parallel: true", capability_of(groups.device))
            reason = reason if problem is None else problem
        log(f"async_tensor_parallel: auto chose {str(problem is None).lower()}: {reason}")
    if problem is None and group is not None:
        enable_symmetric_memory(group)
        for module in stage.modules():
            if isinstance(module, Linear):
                module.async_tensor_parallel = True


def missing_requirement(sequence_parallel: bool, groups: ParallelGroups) -> str | None:
    """Returns the first unmet requirement of `async_tensor_parallel`, worded to follow "needs", or None."""
    if not sequence_parallel:
        return "sequence_parallel: true and model_parallel_size above 1, or nothing is gathered and scattered"
    device, size = groups.device, groups.size("tensor")
    if device.type != "cuda":
        return f"GPUs, but this runs on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability 8.0, but {torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", groups.world_size))  # set by torchrun and by our launcher
    if ranks_here % size:
        return f"all {size} tensor ranks on one machine, but this one has {ranks_here} ranks"
    first_device = (device.index or 0) // size * size
    if first_device + size <= torch.cuda.device_count():  # else each rank sees only its own GPU
        for reader, peer in permutations(range(first_device, first_device + size), 2):
            if not torch.cuda.can_device_access_peer(reader, peer):
                return f"GPUs that read each other's memory (NVLink), but cuda:{reader} cannot read cuda:{peer}'s"
    return None
