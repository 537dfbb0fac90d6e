"""Imports packages that only some runs need; a missing package is an error that says how to install it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.resolved import ResolvedArgs

# By module: the names of packages that are compiled for the installed torch, and how to install them
_COMPILED = {
    "flash_attn": ("flash-attn", "pip install --no-build-isolation flash-attn==2.8.3.post2"),
    "transformer_engine": (
        "Transformer-Engine",
        'pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.20.2"',
    ),
    "mamba_ssm": ("mamba-ssm", "pip install --no-build-isolation mamba-ssm==2.3.2.post1"),
    "causal_conv1d": ("causal-conv1d", "pip install --no-build-isolation causal-conv1d==1.7.0"),
    "fla": ("flash-linear-attention", "pip install flash-linear-attention==0.6.0"),
    "apex": ("NVIDIA's apex", "compile it from https://github.com/NVIDIA/apex"),
}


class PackageProblem(Exception):
    """Raised if a compiled package is missing or does not work here.

    The message is the end of a sentence "... needs": the package's name, the problem, and what to install.
    """


def require_lm_eval(args: ResolvedArgs) -> None:
    """Raises ConfigError, before anything is built, if the key `eval_tasks` is set and lm-eval is not
    installed."""
    if args.eval_tasks and find_spec("lm_eval") is None:
        need = "needs lm-eval: pip install 'neox[eval]' (or --set eval_tasks=null, to train without evaluation)"
        raise args.error("eval_tasks", need)


def require_report(args: ResolvedArgs) -> None:
    """Raises ConfigError, before anything is built, if the key `report` is set and bokeh or a folder is
    missing."""
    if not args.report:
        return
    if find_spec("bokeh") is None:
        raise args.error("report", "needs bokeh: pip install 'neox[report]' (or --set report=false)")
    if args.save is None and args.log_dir is None:
        raise args.error("report", "needs a folder to write the report to; set save or log_dir")


def import_optional(name: str, missing: UserError) -> Any:
    """Imports the package or module of this name. Raises `missing` if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise missing from None


def import_compiled(module: str, *names: str) -> Any:
    """Imports a module of a package in `_COMPILED`, and checks that it has the attributes `names`.

    module: such as `flash_attn`, `transformer_engine.pytorch` or `apex.optimizers` (NVIDIA's apex). Raises
    PackageProblem if the package is not installed, is another package of that name, lacks an attribute, or
    cannot be imported (compiled for another torch or CUDA, or no GPU).
    """
    package = module.split(".")[0]
    name, install = _COMPILED[package]
    fix = f"{install} (docs/install.md)"
    if find_spec(package) is None:
        raise PackageProblem(f"{name}, which is not installed: {fix}")
    if package == "apex" and find_spec("apex.optimizers") is None:
        mistaken = "the installed package apex is another project, which has that name on PyPI"
        raise PackageProblem(f"{name}; {mistaken}: pip uninstall apex, then {fix}")
    try:
        imported = import_module(module)
    except Exception as problem:  # without CUDA Transformer-Engine raises RuntimeError or OSError
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        raise PackageProblem(f"{name}, which is installed and cannot be imported ({reason}): {fix}") from problem
    lacking = [attribute for attribute in names if not hasattr(imported, attribute)]
    if lacking:
        hint = " (only flash-attn-4 is installed)" if package == "flash_attn" else ""
        raise PackageProblem(f"{name} with {', '.join(lacking)}, which {module} does not have{hint}: {fix}")
    return imported
