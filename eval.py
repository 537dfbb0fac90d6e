#!/usr/bin/env python
"""Evaluate a model: `python deepy.py eval.py -d configs a.yml --eval_tasks lambada hellaswag`, or this script
directly under torchrun, srun or alone; `--hf-model DIR` takes a HuggingFace model as it is."""

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.process import (
    StopRequested,
    begin_process,
    end_process,
    outlive_readers,
    run_command,
    show_stacks_on_signal,
)

_ADVICE = "with eval_cache the same command goes on"

if TYPE_CHECKING:
    from megatron.neox_arguments import MutableNeoXArgs, NeoXArgs


def main(
    input_args: "Sequence[str] | NeoXArgs | MutableNeoXArgs | None" = None,
    overwrite_values: Mapping[str, Any] | None = None,
) -> int:
    """Run on this rank; the exit code. A program may pass words of a command line, or a configuration it
    made."""
    from megatron.launch import enter

    show_stacks_on_signal()  # before anything slow is imported
    from megatron.neox_arguments import UserError, require_lm_eval, script_args

    try:
        args = script_args(input_args, overwrite_values, "eval.py", hf_model_keys).check_evaluation()
        outlive_readers()
        require_lm_eval(args)
        process = enter(args)
        from megatron.evaluation import run_evaluation

        return 0 if run_evaluation(args, process, track) else 1
    except UserError as problem:
        sys.stderr.write(problem.error_lines("eval.py"))
        return 1
    except StopRequested as stop:
        sys.stderr.write(f"eval.py: ended by {stop}; {_ADVICE}\n")
        return 128 + stop.number


def hf_model_keys(name: str) -> Mapping[str, object]:
    """Returns the configuration keys of the model that `--hf-model` names."""
    from megatron.generation.from_huggingface import hf_model_keys

    return hf_model_keys(name)


def track(args: "NeoXArgs", metrics: Mapping[str, float]) -> None:
    """Hand the scores to the trackers of the configuration, as a run of their own at the checkpoint's
    iteration."""
    if not (args.tensorboard_dir or args.use_wandb or args.use_comet):
        return
    import torch

    # Told which it is, DeepSpeed does not search for accelerators and warn of finding none.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from megatron.training.metrics.loggers import build_trackers

    # Iteration 0: nothing that the training wrote is hidden.
    for target in build_trackers(args, 0, secrets.token_hex(16), json.loads(args.to_json())["given"]):
        target.write({"iteration": args.iteration or 0, **metrics})
        target.close()


if __name__ == "__main__":
    begin_process("eval.py", _ADVICE, promise="the evaluation ends after the requests that it scores now")
    run_command(lambda: end_process(main()))
