"""Decides whether a run uses NVIDIA's apex, and for which parts: norms, Adam."""

from collections.abc import Callable

import torch

from megatron.model import Stage
from megatron.model.norm_functions import apex_norms
from megatron.model.norms import set_norm_functions
from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.optional_packages import PackageProblem
from megatron.training.native.apex_adam import ApexAdam
from megatron.training.offload import offloads_optimizer


def uses_apex(args: ModelArgs, device: torch.device) -> bool:
    """Returns whether the run uses apex on this device.

    Apex is used only if one tiny call of each of its parts succeeds. `apex: auto` also requires a kind of GPU
    on which we have run apex. Raises ConfigError if `apex: true` is set and apex does not work.
    """
    if args.apex == "auto" and not_run_on("apex: true", capability_of(device)) is not None:
        return False
    problem = None if args.apex is False else apex_problem(device)
    if problem is not None and args.apex is True:
        raise args.error("apex", f"true needs {problem}; or write apex: false")
    return args.apex is not False and problem is None


def apex_problem(device: torch.device) -> str | None:
    """Returns the reason why apex does not work, worded to follow "needs"; None if it works."""
    try:
        norms, x = apex_norms(), torch.ones(2, 8, device=device, requires_grad=True)
        weight = torch.nn.Parameter(torch.ones(8, device=device))
        out = norms.layer_norm(x, (8,), weight, None, 1e-5) + norms.rms_norm(x, (8,), weight, 1e-5, False)
        out.sum().backward()
        ApexAdam([{"params": [weight], "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.99), eps=1e-8).step()
    except PackageProblem as problem:
        return str(problem)
    except Exception as problem:  # apex imports its extensions late, and their errors are of any kind
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        return f"NVIDIA's apex to work on {device.type} ({type(problem).__name__}: {reason})"
    return None


def use_apex_norms(stage: Stage, args: NeoXArgs, engine: str, log: Callable[[str], None]) -> None:
    """Make a stage's norms use apex's functions if the run uses apex, and log which parts of apex it uses."""
    if args.apex is False:
        return
    parts = []
    if uses_apex(args, stage.device_of_groups):
        if not stage.compiled and args.te_backend != "transformer_engine":
            set_norm_functions(stage, apex_norms())
            parts.append("FusedLayerNorm and FusedRMSNorm")
        if engine == "native" and args.optimizer_name in ("adam", "adamw") and not offloads_optimizer(args):
            parts.append("FusedAdam")
        choice = (
            ", ".join(parts)
            or "no part of apex: norms are compiled or Transformer-Engine's, and the native engine's Adam is not used"
        )
    else:
        unproven = not_run_on("apex: true", capability_of(stage.device_of_groups))
        choice = f"torch instead of apex: {unproven or f'it would need {apex_problem(stage.device_of_groups)}'}"
    log(f"apex: {str(args.apex).lower()} chose {choice}")
