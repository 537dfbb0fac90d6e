"""Reads defaults of the command-line tools from the file of the site (cluster) that NEOX_SITE names.

docs/slurm.md describes the file."""

import argparse
import sys
from pathlib import Path

from megatron.launch.environment import LaunchError
from megatron.launch.site import site_variables


def site_defaults(parser: argparse.ArgumentParser | None = None) -> dict[str, str]:
    """Returns the variables in the file of the site that NEOX_SITE names; {} if NEOX_SITE is unset.

    If the file cannot be read, the program exits with an error message, printed by `parser` if given.
    """
    try:
        return site_variables()
    except LaunchError as problem:
        if parser is not None:
            parser.error(str(problem))
        sys.exit(f"{Path(sys.argv[0]).name}: error: {problem}")
