#!/usr/bin/env python
"""Train a model: `python deepy.py train.py a.yml b.yml`, or this script directly under torchrun, srun or alone."""

import os
import sys
from collections.abc import Sequence

from megatron.process import begin_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; the exit code."""
    from megatron.launch import LaunchError, enter, set_arch_list, show_stacks_on_signal

    show_stacks_on_signal()  # before anything slow is imported
    from megatron.checkpointing import CheckpointError
    from megatron.data import DataError
    from megatron.mpu import StartError
    from megatron.neox_arguments import ConfigError, parse_script
    from megatron.tokenizer import TokenizerError

    try:
        args = parse_script(argv, "train.py").check_training()
        if args.eval_tasks:
            from megatron.evaluation import InTraining, need_harness

            need_harness(args)
        if args.demo_prompts is not None:
            from megatron.generation.demos import Demos, demo_questions

            demo_questions(args)  # a reference may be scored for hours before they are asked
        process = enter(args)
        said = set_arch_list(os.environ)
        if said and process.rank == 0:
            print(said, file=sys.stderr)
        import torch

        # Told which it is, DeepSpeed does not search for accelerators and warn of finding none.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        from megatron.training import Callback, NonFiniteError, start, train

        training = start(args, process)
        callbacks: list[Callback] = [InTraining(training)] if args.eval_tasks else []
        if args.demo_prompts is not None:
            callbacks.append(Demos(training))
        try:
            train(training, callbacks)
        except NonFiniteError as problem:
            print(f"train.py: error: {problem}", file=sys.stderr)
            return 1
        training.close()
    except (ConfigError, LaunchError, StartError, DataError, TokenizerError, CheckpointError) as problem:
        for line in str(problem).splitlines():
            print(f"train.py: error: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    begin_process("train.py")
    sys.exit(main())
