"""What programs written for GPT-NeoX call on NeoXArgs, by its names."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.neox_arguments.declare import REQUIRED, keys_of
from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.frozen import thaw

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs

ARGS_FLAG = "--neox-args"
# Keys that DeepSpeed's launcher has as flags of the same name.
_RUNNER = ("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_addr", "master_port", "launcher")
_SWITCHES = ("force_multi", "no_ssh_check")


class NeoXNames:
    """GPT-NeoX's constructors and methods; `NeoXArgs` is one of these."""

    def __post_init__(self) -> None:
        missing = [name for name, known in keys_of(type(self)).items() if getattr(self, name) is REQUIRED]
        if missing:
            raise ConfigError([f"NeoXArgs(...): {', '.join(missing)} are required; use NeoXArgs.from_dict"])

    @classmethod
    def from_ymls(
        cls, paths_to_yml_files: Sequence[str | Path], overwrite_values: Mapping[str, Any] | None = None
    ) -> "NeoXArgs":
        """As `load`; overwrite_values win over the files. Raises ConfigError."""
        from megatron.neox_arguments.neox_args import load

        return load(paths_to_yml_files, overwrite_values or {}, "overwrite_values")

    @classmethod
    def consume_deepy_args(cls, input_args: Sequence[str] | None = None) -> "NeoXArgs":
        """The configuration of a command line of deepy.py, `train.py a.yml b.yml`; sys.argv's. Raises ConfigError."""
        from megatron.neox_arguments.cli import parse_deepy

        return parse_deepy(input_args).args

    @classmethod
    def consume_neox_args(
        cls, overwrite_values: Mapping[str, Any] | None = None, input_args: Sequence[str] | None = None
    ) -> "NeoXArgs":
        """The configuration that a launcher handed to this process by `--neox-args FILE`; other words are not looked
        at. Raises ConfigError."""
        from megatron.neox_arguments.cli import parse_script

        words = list(sys.argv[1:] if input_args is None else input_args)
        if ARGS_FLAG not in words:
            raise ConfigError([f"{ARGS_FLAG} FILE is not among the arguments: start this through deepy.py"])
        start = words.index(ARGS_FLAG)
        args = parse_script(words[start : start + 2], "train.py")
        return args.replace(**overwrite_values) if overwrite_values else args

    def get_deepspeed_main_args(self: "NeoXArgs") -> list[str]:  # type: ignore[misc]
        """Words for DeepSpeed's launcher (`deepspeed.launcher.runner.main`): its flags, `user_script` or train.py, and
        the configuration in a file of the temporary folder."""
        with tempfile.NamedTemporaryFile("w", prefix="neox_args.", suffix=".json", delete=False) as file:
            file.write(self.to_json())
        flags = [f"--{name}={getattr(self, name)}" for name in _RUNNER if self.origin(name) != "default"]
        flags += [f"--{name}" for name in _SWITCHES if getattr(self, name)]
        return [*flags, "--no_local_rank", self.user_script or "train.py", ARGS_FLAG, file.name]

    @property
    def megatron_config(self) -> dict[str, Any]:
        """Every key whose value is not the default, as plain lists and mappings."""
        values = {name: (getattr(self, name), known.default) for name, known in keys_of(type(self)).items()}
        return {name: thaw(value) for name, (value, default) in values.items() if value != default}

    def update_value(self, key: str, value: Any) -> NoReturn:
        """Raises TypeError: a resolved configuration is never written to."""
        raise TypeError(f"NeoXArgs is read-only: write args = args.replace({key}={value!r}) for a new one")

    @classmethod
    def validate_keys(cls) -> bool:
        """Whether no two groups of keys declare the same key. Raises ValueError naming it."""
        seen: dict[str, str] = {}
        for base in cls.__mro__[1:]:
            for name in vars(base).get("__annotations__", {}):
                if name in seen:
                    raise ValueError(f"{name} is declared by {seen[name]} and by {base.__name__}")
                seen[name] = base.__name__
        return True
