"""Whether a package is there that keys ask for and only some runs need; it is imported where it is used."""

from importlib.util import find_spec

from megatron.neox_arguments.neox_args import NeoXArgs


def need_harness(args: NeoXArgs) -> None:
    """Raises ConfigError, before anything is built, where tasks are asked for and lm-eval is not installed."""
    if args.eval_tasks and find_spec("lm_eval") is None:
        need = "needs lm-eval: pip install 'neox[eval]' (or --set eval_tasks=null, to train without evaluation)"
        raise args.problem("eval_tasks", need)
