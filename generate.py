#!/usr/bin/env python
"""Write text: `python deepy.py generate.py -d configs a.yml text_generation.yml`, or this script directly."""

import sys
from collections.abc import Sequence

from megatron.neox_arguments import ConfigError, parse_script


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; the exit code."""
    from megatron.checkpointing import CheckpointError
    from megatron.launch import LaunchError, process_info
    from megatron.tokenizer import TokenizerError

    try:
        args = parse_script(argv, "generate.py").check_generation()
        process = process_info(master_addr=args.master_addr, master_port=args.master_port)
        from megatron.generation import generate

        generate(args, process)
    except (ConfigError, LaunchError, TokenizerError, CheckpointError) as problem:
        for line in str(problem).splitlines():
            print(f"generate.py: error: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
