"""Packages that only some runs need: whether one is there that keys ask for, and its import where it is used."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.resolved import ResolvedArgs


def require_lm_eval(args: ResolvedArgs) -> None:
    """Raises ConfigError, before anything is built, where tasks are asked for and lm-eval is not installed."""
    if args.eval_tasks and find_spec("lm_eval") is None:
        need = "needs lm-eval: pip install 'neox[eval]' (or --set eval_tasks=null, to train without evaluation)"
        raise args.problem("eval_tasks", need)


def package(name: str, missing: UserError) -> Any:
    """The package or module of this name; raises `missing`, which says who needs it, where it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise missing from None
