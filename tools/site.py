"""Defaults of the command-line tools from the site that NEOX_SITE names (docs/slurm.md)."""

import argparse
import sys
from pathlib import Path

from megatron.launch.environment import LaunchError
from megatron.launch.site import site_variables


def site_defaults(parser: argparse.ArgumentParser | None = None) -> dict[str, str]:
    """The variables of the site that NEOX_SITE names; {} without one.

    A site that cannot be read ends the command with a line of text.
    """
    try:
        return site_variables()
    except LaunchError as problem:
        if parser is not None:
            parser.error(str(problem))
        sys.exit(f"{Path(sys.argv[0]).name}: error: {problem}")
