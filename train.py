#!/usr/bin/env python
"""Train a model: `python deepy.py train.py a.yml b.yml`, or this script directly under torchrun, srun or alone."""

import os
import sys
from collections.abc import Sequence

from megatron.neox_arguments import ConfigError, parse_script


def main(argv: Sequence[str] | None = None) -> int:
    """Run on this rank; the exit code."""
    from megatron.checkpointing import CheckpointError
    from megatron.data import DataError
    from megatron.launch import LaunchError, process_info
    from megatron.tokenizer import TokenizerError

    try:
        args = parse_script(argv, "train.py").check_training()
        port = None if args.origin("master_port") == "default" else args.master_port
        process = process_info(master_addr=args.master_addr, master_port=port)
        os.environ.update(process.variables())
        import torch

        # Told which it is, DeepSpeed does not search for accelerators and warn of finding none.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        from megatron.training import NonFiniteError, start, train

        training = start(args, process)
        try:
            train(training)
        except NonFiniteError as problem:
            print(f"train.py: error: {problem}", file=sys.stderr)
            return 1
        training.close()
    except (ConfigError, LaunchError, DataError, TokenizerError, CheckpointError) as problem:
        for line in str(problem).splitlines():
            print(f"train.py: error: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
