"""Every configuration key: declared once, read from YAML, derived, validated, frozen.

The bottom room: it imports neither torch nor DeepSpeed, so that resolving a configuration is instant.
"""

from typing import Any

from megatron.neox_arguments.errors import ConfigError, UserError
from megatron.neox_arguments.installed import need_harness
from megatron.neox_arguments.neox_args import NeoXArgs, load
from megatron.neox_arguments.neox_names import group
from megatron.neox_arguments.program import ProgramArgs
from megatron.neox_arguments.reading.command_line import parse_script, script_args
from megatron.neox_arguments.reports.config_dump import arguments_dump, flat_values, yaml_value

__all__ = [
    "ConfigError",
    "NeoXArgs",
    "ProgramArgs",
    "UserError",
    "arguments_dump",
    "flat_values",
    "load",
    "need_harness",
    "parse_script",
    "script_args",
    "yaml_value",
]


def __getattr__(name: str) -> Any:
    """GPT-NeoX's groups of keys by its names, as `NeoXArgsTokenizer`."""
    return group(name, __name__)
