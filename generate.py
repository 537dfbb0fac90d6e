#!/usr/bin/env python
"""Generates text with a model: `python deepy.py generate.py -d configs a.yml text_generation.yml`.

The script also runs directly, without deepy.py."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.process import begin_process, end_process, outlive_readers, run_command, show_stacks_on_signal

if TYPE_CHECKING:
    from megatron.neox_arguments import MutableNeoXArgs, NeoXArgs


def main(
    input_args: "Sequence[str] | NeoXArgs | MutableNeoXArgs | None" = None,
    overwrite_values: Mapping[str, Any] | None = None,
) -> int:
    """Generates text on this rank, and returns the exit code: 0, or 1 after an error.

    input_args: words of a command line, or a configuration; None: the command line of this process.
    overwrite_values: keys that override the configuration."""
    from megatron.launch import enter

    show_stacks_on_signal()  # before anything slow is imported
    from megatron.neox_arguments import UserError, script_args

    try:
        args = script_args(input_args, overwrite_values, "generate.py", hf_model_keys).check_generation()
        outlive_readers()
        process = enter(args)
        from megatron.generation import generate

        generate(args, process)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("generate.py"))
        return 1
    return 0


def hf_model_keys(name: str) -> Mapping[str, object]:
    """Returns the configuration keys of the HuggingFace model that `--hf-model` names."""
    from megatron.generation.from_huggingface import hf_model_keys

    return hf_model_keys(name)


if __name__ == "__main__":
    begin_process("generate.py")
    run_command(lambda: end_process(main()))
