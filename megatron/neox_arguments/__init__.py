"""Declares all configuration keys, reads them from YAML, derives further values, and checks and freezes them.

This is the lowest package: it imports neither torch nor DeepSpeed, so that resolving a configuration is
instant.
"""

from typing import Any

from megatron.neox_arguments.compat.key_groups import key_group
from megatron.neox_arguments.compat.program import MutableNeoXArgs, script_args
from megatron.neox_arguments.errors import ConfigError, UserError
from megatron.neox_arguments.model_args import ModelArgs
from megatron.neox_arguments.neox_args import NeoXArgs, load
from megatron.neox_arguments.optional_packages import require_lm_eval, require_report
from megatron.neox_arguments.reading.command_line import parse_script
from megatron.neox_arguments.reports.config_dump import arguments_dump, flat_values, yaml_value

__all__ = [
    "ConfigError",
    "ModelArgs",
    "MutableNeoXArgs",
    "NeoXArgs",
    "UserError",
    "arguments_dump",
    "flat_values",
    "load",
    "parse_script",
    "require_lm_eval",
    "require_report",
    "script_args",
    "yaml_value",
]


def __getattr__(name: str) -> Any:
    """Returns the dataclass of one of GPT-NeoX's key groups by its name, such as `NeoXArgsTokenizer`. Raises
    AttributeError for any other name."""
    return key_group(name, __name__)
