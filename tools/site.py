"""Defaults of the command-line tools from the site that NEOX_SITE names (docs/slurm.md)."""

import argparse
import sys
from pathlib import Path

from megatron.launch.environment import LaunchError
from megatron.launch.site import site_variables


def site_defaults(parser: argparse.ArgumentParser | None = None) -> dict[str, str]:
    """Returns the variables of the site that NEOX_SITE names; {} if it names none.

    If the site's file cannot be read, the command ends with a one-line error, printed by `parser` if given.
    """
    try:
        return site_variables()
    except LaunchError as problem:
        if parser is not None:
            parser.error(str(problem))
        sys.exit(f"{Path(sys.argv[0]).name}: error: {problem}")
