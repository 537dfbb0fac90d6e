"""Every configuration key: declared once, read from YAML, derived, validated, frozen.

The bottom room: it imports neither torch nor DeepSpeed, so that resolving a configuration is instant.
"""

from megatron.neox_arguments.cli import DeepyCommand, parse_deepy, parse_script
from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.neox_args import NeoXArgs, load
from megatron.neox_arguments.report import arguments_dump, print_config

__all__ = [
    "ConfigError",
    "DeepyCommand",
    "NeoXArgs",
    "arguments_dump",
    "load",
    "parse_deepy",
    "parse_script",
    "print_config",
]
