"""Transformer-Engine in a run: whether its kernels compute, and for what."""

from collections.abc import Callable

import torch

from megatron.model import Stage
from megatron.model.norm_functions import transformer_engine_norms
from megatron.model.norms import set_norm_functions
from megatron.mpu.fp8.transformer_engine import engine_problem
from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.neox_arguments import ModelArgs
from megatron.training.precision_policy import Recipe

_RECIPES = ("te", "tensorwise", "mxfp8")


def choose_te_backend(args: ModelArgs, recipe: Recipe | None, device: torch.device) -> tuple[bool, str]:
    """Returns (whether Transformer-Engine multiplies in FP8, words about it for the log), by `te_backend`.

    recipe: of FP8; None: without FP8. `auto` uses it only for delayed scaling (`te`), if it is installed,
    works, has run on such a GPU, and blocks are not compiled: torch cannot compile its calls.
    Raises ConfigError if `te_backend` names it and it is not available.
    """
    if args.te_backend == "native" or (args.te_backend == "auto" and recipe != "te"):
        return False, ""
    unproven = not_run_on("te_backend: transformer_engine", capability_of(device))
    if args.te_backend == "auto" and unproven is not None:
        return False, f"; te_backend: auto chose native, the other: {unproven}"
    problem = None
    if args.compile not in (False, "auto"):  # auto: nothing is compiled
        problem = f"compile: false, not {args.compile}: torch cannot compile its calls"
    elif recipe not in (None, *_RECIPES):
        problem = f"precision_fp8: {', '.join(_RECIPES)} or off, not {recipe}, which it does not have"
    else:
        problem = engine_problem(device, recipe or "tensorwise")
    if args.te_backend == "transformer_engine":
        if problem is not None:
            raise args.error("te_backend", f"transformer_engine needs {problem}; or write te_backend: native")
        return recipe is not None, "; multiplied by Transformer-Engine (te_backend)"
    if problem is None:
        return True, "; te_backend: auto chose transformer_engine"
    return False, f"; te_backend: auto chose native, the other would need {problem}"


def use_transformer_engine_norms(
    stage: Stage, args: ModelArgs, recipe: Recipe | None, log: Callable[[str], None]
) -> None:
    """Let a stage's norms compute with Transformer-Engine's kernels if `te_backend` names it.

    recipe: of FP8; None: without FP8. Raises ConfigError if the kernels do not work, or `apex: true` also
    claims the norms.
    """
    if args.te_backend != "transformer_engine":
        return
    if args.apex is True:
        raise args.error("apex", f"te_backend ({args.origin('te_backend')}) has the norms; remove one of both")
    choose_te_backend(args, recipe, stage.device_of_groups)
    set_norm_functions(stage, transformer_engine_norms())
    log("te_backend: transformer_engine computes the norms" + ("" if recipe is None else " and FP8"))
