"""Compiles blocks with torch.compile: decides whether a run does, and compiles each kind of block once."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch

from megatron.model import Stage
from megatron.model.block import Block
from megatron.model.head import OutputProjection
from megatron.model.mamba.selective_scan import AT_A_TIME_COMPILED
from megatron.model.moe.layer import Dispatcher
from megatron.model.specs import BlockSpec, MoESpec
from megatron.mpu import Linear
from megatron.mpu.gpu_kernels import not_run_on
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of
from megatron.training.precision_policy import gpu_policy

Compile = Literal[False, "block", "block-max"]
# Graphs of one kind of block: with and without gradients, another length of rows, dropout in training alone.
_GRAPHS_OF_A_KIND = 8


def choose_compile(args: NeoXArgs, device: torch.device, engine: str) -> tuple[Compile, str]:
    """Returns the value of `compile` for a run of this engine (its name) on this device, and its reason in
    words for the log."""
    if args.compile != "auto":
        return args.compile, args.origin("compile")
    if device.type != "cuda":
        return False, "auto: not on CPUs, where it takes longer than it saves"
    if (reason := declaration_of(args).eager_reason(args)) is not None:
        return False, f"auto: {reason}"
    if hooked_inside(args, engine):
        return False, "auto: DeepSpeed's ZeRO 3 has hooks within blocks, which would cut their graphs"
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
    policy, reason = gpu_policy(capability), "auto: Triton and a C compiler are here"
    if policy.compile == "block-max" and (unproven := not_run_on("compile: block-max", capability)) is not None:
        reason += f"; not block-max: {unproven}"
    elif policy.compile == "block-max" and args.precision_fp8 == "off" and not args.deterministic_mode:
        # Who turns FP8 off asks for what is best in bf16; what `auto` may choose later is compiled as `block`
        if args.user_values.get("precision_fp8") == "off":
            place = args.origin("precision_fp8")
            max_reason = f"auto: bf16 on {policy.name} by precision_fp8 ({place}); minutes more at the start"
            return "block-max", max_reason
        reason += f"; block-max, for long runs in bf16 on {policy.name}, takes minutes more at the start"
    return "block", reason


def resolve_compile(args: NeoXArgs, device: torch.device, engine: str, log: Callable[[str], None]) -> NeoXArgs:
    """Returns the configuration with `compile: auto` replaced by the choice, which is logged.

    Raises ConfigError if a key needs compiled blocks and compile is off, or if the engine's hooks prevent
    compiling.
    """
    choice, reason = choose_compile(args, device, engine)
    if args.activation_memory_budget is not None and not choice:
        problem = f"{args.activation_memory_budget} needs compiled blocks, but compile is off ({reason})"
        raise args.error("activation_memory_budget", f"{problem}; set compile: block, or checkpoint_activations: true")
    if args.compile != "auto":
        if choice and hooked_inside(args, engine):
            problem = "DeepSpeed's ZeRO 3 has hooks within blocks, which would cut their graphs"
            raise args.error("compile", f"{problem}; write engine: native, another ZeRO stage, or compile: auto")
        return args
    log(f"compile: {choice or 'false'} ({reason})")
    return args.settle("compile", choice)


def compile_blocks(stage: Stage, args: NeoXArgs) -> None:
    """Compile every block, and separately the work on a chunk of logits.

    Blocks of one kind share a graph that takes their weights as inputs and documents of any number and
    length. A second length of rows adds one graph, which serves all lengths. Mamba blocks need one more for
    each number of segments (`selective_scan`).

    A block that does not become one graph raises in the first step, except blocks with expert parallelism and
    Mamba blocks whose kernels come from a package.
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
        products = frozenset(type(module.product) for module in block.modules() if isinstance(module, Linear))
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
            if isinstance(module, Dispatcher) and not one_graph:
                # Tokens that travel to experts on other ranks do so between two graphs.
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        is_full_graph = one_graph or not isinstance(spec.feed_forward, MoESpec)
        is_full_graph &= spec not in stage.state_blocks or stage.scans.package == "torch"
        block.compile(fullgraph=is_full_graph, **mode)
    if isinstance(head := stage.layers[str(stage.specs[-1].index)], OutputProjection):
        head.compile_kernels()


def hooked_inside(args: NeoXArgs, engine: str) -> bool:
    """Returns whether the engine runs hooks within blocks, which break their graphs."""
    return engine == "deepspeed" and args.zero_stage == 3


def _compilers(device: torch.device) -> list[str]:
    # On a GPU it is Triton that compiles its launchers.
    return [os.environ.get("CXX", "g++")] if device.type == "cpu" else [os.environ.get("CC", "gcc"), "clang"]


def has_compiler(device: torch.device) -> bool:
    """Returns whether the compiler that torch.compile and Triton need on this device is on the PATH."""
    return any(map(shutil.which, _compilers(device)))
