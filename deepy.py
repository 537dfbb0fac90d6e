#!/usr/bin/env python3
"""Start a script on the ranks of this machine: python deepy.py train.py a.yml b.yml."""

import sys
from collections.abc import Mapping

from megatron.launch import LaunchError, launch_local
from megatron.neox_arguments import ConfigError
from megatron.neox_arguments.cli import parse_deepy
from megatron.neox_arguments.report import print_config


def hf_model_keys(name: str) -> Mapping[str, object]:
    """What `--hf-model` says."""
    from megatron.generation.adopting import hf_model_keys

    return hf_model_keys(name)


def main() -> int:
    try:
        command = parse_deepy(adopt=hf_model_keys)
        if command.print_config:
            print(print_config(command.args))
            return 0
        return launch_local(command.user_script, command.args)
    except (ConfigError, LaunchError) as problem:
        for line in str(problem).splitlines():
            print(f"deepy.py: error: {line}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
