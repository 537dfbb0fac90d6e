"""Packages that only some runs need, imported where they are used; a missing one is an error for people."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.resolved import ResolvedArgs


def require_lm_eval(args: ResolvedArgs) -> None:
    """Raises ConfigError, before anything is built, if eval_tasks are asked for and lm-eval is not
    installed."""
    if args.eval_tasks and find_spec("lm_eval") is None:
        need = "needs lm-eval: pip install 'neox[eval]' (or --set eval_tasks=null, to train without evaluation)"
        raise args.error("eval_tasks", need)


def import_optional(name: str, missing: UserError) -> Any:
    """Import the package or module of this name; raises `missing`, which says what needs it, if it is not
    installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise missing from None
