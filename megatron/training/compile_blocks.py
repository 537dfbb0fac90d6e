"""Compiles a model's blocks with torch.compile: decides whether to, and compiles each kind of block once."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch

from megatron.model import Stage
from megatron.model.block import Block
from megatron.model.delta.mixer import DeltaScan
from megatron.model.head import OutputProjection
from megatron.model.mamba.selective_scan import AT_A_TIME_COMPILED
from megatron.model.moe.experts import Experts
from megatron.model.moe.layer import Dispatcher
from megatron.model.specs import BlockSpec, GatedDeltaNetSpec, MoESpec
from megatron.mpu import Linear
from megatron.mpu.gpu_kernels import not_run_on
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of
from megatron.training.precision_policy import gpu_policy

Compile = Literal[False, "block", "block-max"]
# Graphs of one kind of block: with and without gradients, another length of rows, dropout in training alone.
_GRAPHS_OF_A_KIND = 8


def choose_compile(args: NeoXArgs, device: torch.device, engine: str) -> tuple[Compile, str]:
    """Returns (value of `compile`, reason for the log): the configured value, or for `auto` the best on this
    device.

    engine: the name of the run's engine.
    """
    if args.compile != "auto":
        return args.compile, args.origin("compile")
    if device.type != "cuda":
        return False, "auto: off on CPUs, where compiling takes longer than it saves"
    if (reason := declaration_of(args).eager_reason(args)) is not None:
        return False, f"auto: {reason}"
    if (obstacle := _obstacle(args, engine)) is not None:
        return False, f"auto: {obstacle[0]}"
    for key in ("te_backend", "attention_backend"):
        if getattr(args, key) == "transformer_engine":
            return False, f"auto: {key} is transformer_engine, whose calls torch cannot compile"
    capability = torch.cuda.get_device_capability(device)
    if capability < (7, 0):
        return False, "auto: Triton needs compute capability 7.0, found {}.{}".format(*capability)
    if find_spec("triton") is None:
        return False, "auto: Triton is not installed"
    if not has_compiler(device):
        return False, f"auto: no C compiler ({' or '.join(_compilers(device))}) on the PATH"
    policy, reason = gpu_policy(capability), "auto: Triton and a C compiler were found"
    if policy.compile == "block-max" and (unproven := not_run_on("compile: block-max", capability)) is not None:
        reason += f"; not block-max: {unproven}"
    elif policy.compile == "block-max" and args.precision_fp8 == "off" and not args.deterministic_mode:
        # If the user turned FP8 off, take the best mode for bf16. If FP8 may still be chosen, compile as
        # `block`.
        if args.user_values.get("precision_fp8") == "off":
            place = args.origin("precision_fp8")
            max_reason = (
                f"auto: best in bf16 on {policy.name}, as precision_fp8 is off ({place}); compiling takes minutes more"
            )
            return "block-max", max_reason
        reason += f"; for long runs in bf16 on {policy.name}, set block-max, which takes minutes longer to compile"
    return "block", reason


def resolve_compile(args: NeoXArgs, device: torch.device, engine: str, log: Callable[[str], None]) -> NeoXArgs:
    """Returns the configuration with `compile: auto` replaced by the value of `choose_compile`, and logs it.

    Raises ConfigError if a key needs compiled blocks and compile is off, or if the engine or the
    pipeline schedule prevents compiling.
    """
    choice, reason = choose_compile(args, device, engine)
    if args.activation_memory_budget is not None and not choice:
        problem = f"{args.activation_memory_budget} needs compiled blocks, but compile is off ({reason})"
        raise args.error(
            "activation_memory_budget", f"{problem}; set compile: block, or use checkpoint_activations: true"
        )
    if args.compile != "auto":
        if choice and (obstacle := _obstacle(args, engine)) is not None:
            problem, fix = obstacle
            raise args.error("compile", f"blocks cannot be compiled: {problem}; {fix}, or write compile: auto")
        return args
    log(f"compile: {choice or 'false'} ({reason})")
    return args.settle("compile", choice)


def compile_blocks(stage: Stage, args: NeoXArgs) -> None:
    """Compile every block of a stage, and separately the output layer's kernels.

    Blocks of one kind share a graph, which takes their weights as inputs and accepts any number and length of
    documents. The first row of another length adds one graph, which serves all row lengths. Mamba blocks need
    one more graph for each number of segments in their scan.

    A block that does not compile to one graph raises in the first step, except blocks with expert
    parallelism, those of Gated DeltaNet, and Mamba blocks whose kernels come from a package.
    Raises ConfigError where there is no compiler.
    """
    if args.compile in (False, "auto"):
        return
    device = stage.device_of_groups
    if not has_compiler(device):  # torch.compile would only say so in the first step
        problem = f"{args.compile} needs {' or '.join(_compilers(device))}, not found on the PATH; set compile: false"
        raise args.error("compile", problem)
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    stage.compiled = True
    kinds: list[tuple[BlockSpec, frozenset[type]]] = []
    for spec in stage.blocks:
        block = stage.layers[str(spec.index)]
        assert isinstance(block, Block)
        products = frozenset(
            type(module.product) for module in block.modules() if isinstance(module, (Linear, Experts))
        )
        kind = (replace(spec, index=0), products)
        kinds += [kind] if kind not in kinds else []
    tokens = args.seq_length * (args.train_micro_batch_size_per_gpu or 1) if args.mamba_blocks else 0
    segments = -(-tokens // AT_A_TIME_COMPILED)
    dynamo.recompile_limit = max(dynamo.recompile_limit, (_GRAPHS_OF_A_KIND + 2 * segments) * len(kinds))
    if args.activation_memory_budget is not None:
        functorch.activation_memory_budget = args.activation_memory_budget
    mode = {"mode": "max-autotune-no-cudagraphs"} if args.compile == "block-max" else {}
    for spec in stage.blocks:
        block, one_graph = stage.layers[str(spec.index)], args.expert_parallel_size == 1
        for module in block.modules():
            if isinstance(module, DeltaScan) or (isinstance(module, Dispatcher) and not one_graph):
                # Tokens are sent to experts on other ranks outside the compiled graphs.
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        is_full_graph = one_graph or not isinstance(spec.feed_forward, MoESpec)
        is_full_graph &= spec not in stage.state_blocks or stage.scans.package == "torch"
        is_full_graph &= not isinstance(spec.mixer, GatedDeltaNetSpec) and args.qk_clip_threshold is None
        block.compile(fullgraph=is_full_graph, **mode)
    if isinstance(head := stage.layers[str(stage.specs[-1].index)], OutputProjection):
        head.compile_kernels()


def _obstacle(args: NeoXArgs, engine: str) -> tuple[str, str] | None:
    """Returns why blocks cannot be compiled in this configuration, and how to change it; None if they can."""
    if engine == "deepspeed" and args.zero_stage == 3:
        return "DeepSpeed's ZeRO 3 runs hooks inside blocks", "write engine: native, or another ZeRO stage"
    if args.context_parallel_type == "ring" and args.ulysses_size < args.context_parallel_size:
        return "torch cannot compile context_parallel_type: ring", "write allgather or ulysses"
    if args.defers_weight_gradients:
        schedule = f"pipeline_schedule {args.cite('pipeline_schedule')}"
        return f"{schedule} computes weight gradients after a block's backward", "write pipeline_schedule: interleaved"
    return None


def _compilers(device: torch.device) -> list[str]:
    # On a GPU Triton needs a compiler for its kernel launchers.
    return [os.environ.get("CXX", "g++")] if device.type == "cpu" else [os.environ.get("CC", "gcc"), "clang"]


def has_compiler(device: torch.device) -> bool:
    """Returns whether the compiler that torch.compile and Triton need on this device is on the PATH."""
    return any(map(shutil.which, _compilers(device)))
