#!/usr/bin/env python
"""Trains a model: `python deepy.py train.py a.yml b.yml`. The script also runs under torchrun, srun or
alone."""

import os
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

if TYPE_CHECKING:
    from megatron.neox_arguments import MutableNeoXArgs, NeoXArgs


def write_initial_weights(args: "NeoXArgs") -> int:
    """Writes the random initial weights of all ranks as a checkpoint, from rank 0 on CPU, for `--init-only`.

    Returns the exit code 0."""
    from megatron.checkpointing.initial_weights import write_initial_weights
    from megatron.launch import process_info
    from megatron.tokenizer import build_tokenizer, with_vocabulary
    from tools.ckpts.flags import progress

    if process_info().rank == 0:
        tokenizer = build_tokenizer(args)
        print(f"{write_initial_weights(with_vocabulary(args, tokenizer), tokenizer.fingerprint(), progress)}: written")
    return 0


def main(
    input_args: "Sequence[str] | NeoXArgs | MutableNeoXArgs | None" = None,
    overwrite_values: Mapping[str, Any] | None = None,
) -> int:
    """Trains on this rank, and returns the exit code: 0, or that of a `UserError`.

    input_args: words of a command line, or a configuration; None: the command line of this process.
    overwrite_values: keys that override the configuration.
    """
    from megatron.launch import enter, set_arch_list

    show_stacks_on_signal()  # before anything slow is imported
    from megatron.neox_arguments import UserError, require_lm_eval, script_args
    from megatron.operations.in_training import check_operations, operation_callbacks, report_at_end

    try:
        args = script_args(input_args, overwrite_values, "train.py").check_training()
        outlive_readers()
        if args.init_only:
            return write_initial_weights(args)
        require_lm_eval(args)
        check_operations(args)
        if args.demo_prompts is not None:
            from megatron.generation.demos import Demos, demo_questions

            demo_questions(args)  # checked early: scoring a reference model may take hours before they are answered
        process = enter(args)
        message = set_arch_list(os.environ)
        if message and process.rank == 0:
            print(message, file=sys.stderr)
        import torch

        # With this variable set, DeepSpeed does not search for accelerators and warn that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        from megatron.callbacks import Callback
        from megatron.training import start, train
        from megatron.training.metrics.loggers import log_directory

        operations = operation_callbacks(args, process.rank)
        training = start(args, process)
        evaluations: list[Callback] = []
        if args.eval_tasks:
            from megatron.evaluation import InTraining

            evaluations.append(InTraining(training))
        if args.demo_prompts is not None:
            evaluations.append(Demos(training))
        try:
            train(training, [*evaluations, *operations])
        finally:
            if process.rank == 0:
                report_at_end(training.args, log_directory(training.args), training.logger)
        training.close()
    except UserError as problem:
        sys.stderr.write(problem.error_lines("train.py"))
        return problem.exit_code
    except StopRequested as stop:
        from megatron.training.builtin_callbacks.status import write_stopped_start

        write_stopped_start(args, process.rank, str(stop))
        if process.rank == 0:
            print(f"run stopped before its first step: {stop}")
    return 0


if __name__ == "__main__":
    begin_process("train.py", promise="the run ends as soon as its current work can be interrupted")
    run_command(lambda: end_process(main()))
