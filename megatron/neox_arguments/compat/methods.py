"""The methods that programs written for GPT-NeoX call on `NeoXArgs`, by GPT-NeoX's names."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import REQUIRED, keys_of, required_keys
from megatron.neox_arguments.resolved import ARGS_FLAG, ResolvedArgs

LAUNCHER_FLAG = "--no_local_rank"  # keeps DeepSpeed's launcher from adding its own flag to the script's flags
# Keys that are also flags of DeepSpeed's launcher: flags with a value, and flags without
_RUNNER_FLAGS = ("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_addr", "master_port", "launcher")
_RUNNER_SWITCHES = ("force_multi", "no_ssh_check")


class GPTNeoXMethods(ResolvedArgs):
    """GPT-NeoX's constructors, which return a writable configuration, and its other methods."""

    mutable_class: ClassVar[Any]
    """The class `MutableNeoXArgs`. Its module `compat.program` sets this attribute, because it imports
    `NeoXArgs`, so that this module cannot import it."""

    def __post_init__(self) -> None:
        missing = [name for name in required_keys(type(self)) if getattr(self, name) is REQUIRED]
        if missing:
            raise ConfigError([f"NeoXArgs(...): set the keys {', '.join(missing)}, or use NeoXArgs.from_dict"])

    @classmethod
    def from_ymls(
        cls, paths_to_yml_files: Sequence[str | Path], overwrite_values: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns a `MutableNeoXArgs` from YAML files; overwrite_values win over the files. Raises
        ConfigError."""
        return cls.mutable_class.from_ymls(paths_to_yml_files, overwrite_values)

    @classmethod
    def consume_deepy_args(cls, input_args: Sequence[str] | None = None) -> Any:
        """Returns a `MutableNeoXArgs` from a command line of deepy.py, such as `train.py a.yml b.yml`.

        input_args: the words of the command line; None: from sys.argv. Raises ConfigError.
        """
        return cls.mutable_class.consume_deepy_args(input_args)

    @classmethod
    def consume_neox_args(
        cls, overwrite_values: Mapping[str, Any] | None = None, input_args: Sequence[str] | None = None
    ) -> Any:
        """Returns a `MutableNeoXArgs` from the file that a launcher passed to this process: `--neox-args
        FILE`.

        Other words of the command line are ignored. Raises ConfigError.
        """
        return cls.mutable_class.consume_neox_args(overwrite_values, input_args)

    def get_deepspeed_main_args(self, user_script: str | None = None) -> list[str]:
        """Returns arguments for DeepSpeed's launcher (`deepspeed.launcher.runner.main`).

        They are the launcher's flags, the script (`user_script`, else train.py), and `--neox-args FILE`. FILE
        is a new temporary file with the configuration.
        """
        with tempfile.NamedTemporaryFile("w", prefix="neox_args.", suffix=".json", delete=False) as file:
            file.write(self.to_json())
        flags = [f"--{name}={getattr(self, name)}" for name in _RUNNER_FLAGS if self.origin(name) != "default"]
        flags += [f"--{name}" for name in _RUNNER_SWITCHES if getattr(self, name)]
        return [*flags, LAUNCHER_FLAG, user_script or self.user_script or "train.py", ARGS_FLAG, file.name]

    @property
    def megatron_config(self) -> dict[str, Any]:
        """Returns every key whose value is not the default, as plain lists and mappings."""
        values = {name: (getattr(self, name), key.default) for name, key in keys_of(type(self)).items()}
        return {name: thaw(value) for name, (value, default) in values.items() if value != default}

    def update_value(self, key: str, value: Any) -> NoReturn:
        """Raises TypeError, because a resolved configuration is read-only. The message names `replace`."""
        raise TypeError(f"a resolved NeoXArgs is read-only: write args = args.replace({key}={value!r}) for a new one")

    def configure_distributed_args(self) -> NoReturn:
        """Raises TypeError, because a resolved configuration is read-only. The message names `for_world`."""
        raise TypeError("a resolved NeoXArgs is read-only: write args = args.for_world(world_size) instead")

    @classmethod
    def validate_keys(cls) -> bool:
        """Returns True if no two key groups declare the same key. Else raises ValueError, which names the
        key."""
        owners: dict[str, str] = {}
        for base in cls.__mro__[1:]:
            for name in vars(base).get("__annotations__", {}):
                if name in owners:
                    raise ValueError(f"{name} is declared by {owners[name]} and {base.__name__}; remove one")
                owners[name] = base.__name__
        return True
