"""Decides whether Transformer-Engine's kernels compute a run's FP8 products and norms."""

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
    """Returns (whether Transformer-Engine computes FP8 products, text about it for the log), by `te_backend`.

    recipe: of FP8; None: without FP8. `te_backend: auto` uses Transformer-Engine only for delayed scaling
    (recipe `te`), if it works here, we have run it on such a GPU, and blocks are not compiled, since torch
    cannot compile its calls.
    Raises ConfigError if `te_backend: transformer_engine` is set and cannot be used.
    """
    if args.te_backend == "native" or (args.te_backend == "auto" and recipe != "te"):
        return False, ""
    unproven = not_run_on("te_backend: transformer_engine", capability_of(device))
    if args.te_backend == "auto" and unproven is not None:
        return False, f"; te_backend: auto chose native, not transformer_engine: {unproven}"
    problem = None
    if args.compile not in (False, "auto"):  # with auto nothing is compiled
        problem = f"compile: false, not {args.compile}: torch cannot compile its calls"
    elif recipe not in (None, *_RECIPES):
        problem = f"precision_fp8: {', '.join(_RECIPES)} or off, as it does not have the recipe {recipe}"
    else:
        problem = engine_problem(device, recipe or "tensorwise")
    if args.te_backend == "transformer_engine":
        if problem is not None:
            raise args.error("te_backend", f"transformer_engine needs {problem}; or write te_backend: native")
        return recipe is not None, "; multiplied by Transformer-Engine (te_backend)"
    if problem is None:
        return True, "; te_backend: auto chose transformer_engine"
    return False, f"; te_backend: auto chose native, transformer_engine would need {problem}"


def use_transformer_engine_norms(
    stage: Stage, args: ModelArgs, recipe: Recipe | None, log: Callable[[str], None]
) -> None:
    """Make a stage's norms use Transformer-Engine's kernels if `te_backend: transformer_engine` is set.

    recipe: of FP8; None: without FP8. Raises ConfigError if the kernels do not work, or if `apex: true` is
    set, which would replace the norms too.
    """
    if args.te_backend != "transformer_engine":
        return
    if args.apex is True:
        raise args.error(
            "apex",
            f"te_backend: transformer_engine ({args.origin('te_backend')}) sets the norms too; remove one of both",
        )
    choose_te_backend(args, recipe, stage.device_of_groups)
    set_norm_functions(stage, transformer_engine_norms())
    log("te_backend: transformer_engine computes the norms" + ("" if recipe is None else " and FP8"))
