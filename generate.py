#!/usr/bin/env python
"""Write text: `python deepy.py generate.py -d configs a.yml text_generation.yml`, or this script directly."""

import sys
from collections.abc import Sequence

from megatron.process import begin_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; the exit code."""
    from megatron.launch import LaunchError, enter, show_stacks_on_signal

    show_stacks_on_signal()  # before anything slow is imported
    from megatron.checkpointing import CheckpointError
    from megatron.data import DataError
    from megatron.generation.adopting import hf_model_keys
    from megatron.mpu import StartError
    from megatron.neox_arguments import ConfigError, parse_script
    from megatron.tokenizer import TokenizerError

    try:
        args = parse_script(argv, "generate.py", hf_model_keys).check_generation()
        process = enter(args)
        from megatron.generation import generate

        generate(args, process)
    except (ConfigError, LaunchError, StartError, DataError, TokenizerError, CheckpointError) as problem:
        for line in str(problem).splitlines():
            print(f"generate.py: error: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    begin_process("generate.py")
    sys.exit(main())
