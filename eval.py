#!/usr/bin/env python
"""Evaluates a model on lm-eval tasks: `python deepy.py eval.py -d configs a.yml --eval_tasks lambada
hellaswag`.

The script also runs under torchrun, srun or alone. With `--hf-model DIR` it evaluates a HuggingFace model."""

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

_ADVICE = "with eval_cache, run the same command again to continue"

if TYPE_CHECKING:
    from megatron.neox_arguments import MutableNeoXArgs, NeoXArgs


def main(
    input_args: "Sequence[str] | NeoXArgs | MutableNeoXArgs | None" = None,
    overwrite_values: Mapping[str, Any] | None = None,
) -> int:
    """Evaluates on this rank, and returns the exit code: 0, 1 after an error, 128 + signal if stopped.

    input_args: words of a command line, or a configuration; None: the command line of this process.
    overwrite_values: keys that override the configuration."""
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
    """Returns the configuration keys of the HuggingFace model that `--hf-model` names."""
    from megatron.generation.from_huggingface import hf_model_keys

    return hf_model_keys(name)


def track(args: "NeoXArgs", metrics: Mapping[str, float]) -> None:
    """Logs evaluation scores to TensorBoard, W&B or Comet, as configured, in a new run of the tracker.

    metrics: scores by name; they are logged at the checkpoint's iteration."""
    if not (args.tensorboard_dir or args.use_wandb or args.use_comet):
        return
    import torch

    # With this variable set, DeepSpeed does not search for accelerators and warn that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from megatron.training.metrics.loggers import build_trackers

    # Starting at iteration 0 hides nothing that the training has logged.
    for target in build_trackers(args, 0, secrets.token_hex(16), json.loads(args.to_json())["given"]):
        target.write({"iteration": args.iteration or 0, **metrics})
        target.close()


if __name__ == "__main__":
    begin_process("eval.py", _ADVICE, promise="the evaluation ends after the requests that it scores now")
    run_command(lambda: end_process(main()))
