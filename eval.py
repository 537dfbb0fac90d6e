#!/usr/bin/env python
"""Evaluate a model: `python deepy.py eval.py -d configs a.yml --eval_tasks lambada hellaswag`, or this script directly
under torchrun, srun or alone; `--hf-model DIR` takes a HuggingFace model as it is."""

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.process import begin_process

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; the exit code."""
    from megatron.launch import LaunchError, enter, show_stacks_on_signal

    show_stacks_on_signal()  # before anything slow is imported
    from megatron.checkpointing import CheckpointError
    from megatron.mpu import StartError
    from megatron.neox_arguments import ConfigError, parse_script
    from megatron.tokenizer import TokenizerError

    try:
        args = parse_script(argv, "eval.py", hf_model_keys).check_evaluation()
        from megatron.evaluation import need_harness, run_evaluation

        need_harness(args)
        return 0 if run_evaluation(args, enter(args), track) else 1
    except (ConfigError, LaunchError, StartError, TokenizerError, CheckpointError) as problem:
        for line in str(problem).splitlines():
            print(f"eval.py: error: {line}", file=sys.stderr)
        return 1


def hf_model_keys(name: str) -> Mapping[str, object]:
    """What `--hf-model` says."""
    from megatron.generation.adopting import hf_model_keys

    return hf_model_keys(name)


def track(args: "NeoXArgs", metrics: Mapping[str, float]) -> None:
    """Hand the scores to the trackers of the configuration, as a run of their own at the checkpoint's iteration."""
    if not (args.tensorboard_dir or args.use_wandb or args.use_comet):
        return
    import torch

    # Told which it is, DeepSpeed does not search for accelerators and warn of finding none.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from megatron.training.loggers import build_trackers

    # Iteration 0: nothing that the training wrote is hidden.
    for target in build_trackers(args, 0, secrets.token_hex(16), json.loads(args.to_json())["given"]):
        target.write({"iteration": args.iteration or 0, **metrics})
        target.close()


if __name__ == "__main__":
    begin_process("eval.py", "with eval_cache the same command goes on")
    sys.exit(main())
