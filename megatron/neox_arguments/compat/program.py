"""A writable configuration for programs written for GPT-NeoX: `from megatron import NeoXArgs`.

    args = NeoXArgs.from_ymls(["125M.yml", "local_setup.yml"])
    args.train_iters = 3
    train.main(args)

Entry points accept it, and pass `args.frozen()` to all other code.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.neox_arguments.compat.methods import LAUNCHER_FLAG
from megatron.neox_arguments.errors import ConfigError, ErrorCollector
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.neox_args import NeoXArgs, load
from megatron.neox_arguments.reading.command_line import ReadHFModel, parse_deepy, parse_script
from megatron.neox_arguments.resolved import ARGS_FLAG
from megatron.neox_arguments.validation.types import check_value, unknown

# Keys that describe one process. Only the writable object has them, because they differ by rank.
PROCESS_KEYS = ("user_script", "rank", "local_rank")
_OTHER_LAUNCHERS_WORLD_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")


class MutableNeoXArgs:
    """A configuration with GPT-NeoX's interface: every key is a writable attribute.

    Sections are mappings as in the files, lists stay lists, and `isinstance(args, NeoXArgs)` holds. Each
    write checks name and type at once. `frozen()` checks values against each other and recomputes derived
    values, such as lr_decay_iters from train_iters. Other properties and methods are those of the frozen
    object.
    """

    __dataclass_fields__ = NeoXArgs.__dataclass_fields__
    validate_keys = NeoXArgs.validate_keys

    def __init__(self, **values: Any) -> None:
        """Resolves a configuration from keyword arguments, one for each key that is set. Raises
        ConfigError."""
        resolved, process_values = _split_process_keys(values)
        self._set_values(load([], resolved, "program"), process_values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MutableNeoXArgs":
        """Resolves a mapping of keys (dotted paths and dashes allowed) into a configuration. Raises
        ConfigError."""
        return cls(**values)

    @classmethod
    def from_ymls(
        cls, paths_to_yml_files: Sequence[str | Path], overwrite_values: Mapping[str, Any] | None = None
    ) -> "MutableNeoXArgs":
        """Returns the configuration of YAML files; overwrite_values win over the files. Raises
        ConfigError."""
        values, process_values = _split_process_keys(overwrite_values)
        return cls._wrap(load(paths_to_yml_files, values, "overwrite_values"), process_values)

    @classmethod
    def consume_deepy_args(cls, input_args: Sequence[str] | None = None) -> "MutableNeoXArgs":
        """Returns the configuration of a command line of deepy.py, such as `train.py a.yml b.yml`.

        input_args: the words of the command line; None: from sys.argv. Raises ConfigError.
        """
        command = parse_deepy(input_args)
        return cls._wrap(command.args, {"user_script": command.user_script})

    @classmethod
    def consume_neox_args(
        cls, overwrite_values: Mapping[str, Any] | None = None, input_args: Sequence[str] | None = None
    ) -> "MutableNeoXArgs":
        """Returns the configuration that a launcher passed to this process by `--neox-args FILE`.

        Other words of the command line are ignored. Raises ConfigError.
        """
        words = list(sys.argv if input_args is None else input_args)
        if ARGS_FLAG not in words:
            raise ConfigError([f"{ARGS_FLAG} FILE is missing in the arguments; start this script with deepy.py"])
        start = words.index(ARGS_FLAG)
        args = parse_script(words[start : start + 2], "train.py")
        values, process_values = _split_process_keys(overwrite_values)
        script = next((word for word in reversed(words[:start]) if not word.startswith("-")), None)
        return cls._wrap(args.replace(**values) if values else args, {"user_script": script} | process_values)

    @classmethod
    def _wrap(cls, args: NeoXArgs, process_values: Mapping[str, Any]) -> "MutableNeoXArgs":
        wrapper = cls.__new__(cls)
        wrapper._set_values(args, process_values)
        return wrapper

    def _set_values(self, args: NeoXArgs, process_values: Mapping[str, Any]) -> None:
        # Two copies: lists and sections can be changed in place, which only a comparison shows.
        self.__dict__.update(_values(args), **process_values, _args=args, _initial_values=_values(args))

    def __setattr__(self, name: str, value: Any) -> None:
        self.update_value(name, value)

    def update_value(self, key: str, value: Any) -> None:
        """Sets a key. Raises ConfigError for an unknown key and for a value of the wrong type."""
        keys = keys_of(NeoXArgs)
        problems = ErrorCollector({})
        if key not in keys:
            problems.add(key, unknown(key, keys))
        elif value is not None:
            check_value(keys[key], key, value, problems)
        problems.raise_if_any()
        self.__dict__[key] = value

    def update_values(self, values: Mapping[str, Any]) -> None:
        """Sets several keys, each with `update_value`. Raises ConfigError."""
        for key, value in values.items():
            self.update_value(key, value)

    def configure_distributed_args(self) -> None:
        """Sets rank, local_rank, world_size and the batch sizes from RANK, LOCAL_RANK and WORLD_SIZE.

        deepy.py and torchrun set these variables; without them world_size is 1. Raises ConfigError for values
        that are no numbers, and for batch sizes that cannot be divided among the ranks.
        """
        env = os.environ
        variable = next((name for name in _OTHER_LAUNCHERS_WORLD_SIZES if env.get(name, "1") != "1"), None)
        if variable is not None and "RANK" not in env:
            raise ConfigError([
                f"{variable} is {env[variable]} in the environment, but RANK is not set; call "
                "megatron.launch.enter(args) first, which sets RANK, LOCAL_RANK and WORLD_SIZE under srun and mpirun"
            ])  # fmt: skip
        try:
            rank, local_rank, world_size = (
                int(env.get(name, default))
                for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
            )
        except ValueError as cause:
            raise ConfigError(
                [f"environment variables RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers: {cause}"]
            ) from None
        process_values = {name: self.__dict__[name] for name in PROCESS_KEYS}
        self._set_values(self.frozen().for_world(world_size), process_values | {"rank": rank, "local_rank": local_rank})

    def frozen(self) -> NeoXArgs:
        """Returns the read-only `NeoXArgs` with all changes, derived and validated again. Raises ConfigError.

        A key that was set to None has its default there.
        """
        values = self._initial_values
        changed = {
            name: value
            for name, value in ((name, self.__dict__.get(name)) for name in values)
            if name not in PROCESS_KEYS and value != values[name]
        }
        return self._args.replace(**changed) if changed else self._args

    def get_deepspeed_main_args(self) -> list[str]:
        """Returns the arguments with which DeepSpeed's launcher starts `user_script`, or train.py if that is
        unset."""
        return self.frozen().get_deepspeed_main_args(self.user_script)

    def __getattr__(self, name: str) -> Any:
        """Returns a property or method of the frozen object. Python calls this only for names that are not
        keys."""
        # copy and pickle ask an object for names before its attributes exist, and a program may ask in the
        # middle of its changes: no name is resolved that is not declared.
        if name.startswith("_") or not (hasattr(NeoXArgs, name) or name in self.__dataclass_fields__):
            raise AttributeError(f"NeoXArgs has no {name}")
        return getattr(self.frozen(), name)

    def __eq__(self, right: object) -> bool:
        """Returns whether every key resolves to the same value in both objects; origins are ignored.

        Raises ConfigError if one of them cannot be resolved.
        """
        if not isinstance(right, NeoXArgs):
            return NotImplemented
        left_args, right_args = self.frozen(), right.frozen()
        keys = keys_of(NeoXArgs).keys() - {"config_files", *PROCESS_KEYS}
        return all(getattr(left_args, name) == getattr(right_args, name) for name in keys) and all(
            getattr(self, name) == getattr(right, name) for name in PROCESS_KEYS
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Returns text such as `NeoXArgs(num_layers=2)`, with the keys whose values are not their
        defaults."""
        values = ((name, self.__dict__.get(name), key.default) for name, key in keys_of(NeoXArgs).items())
        texts = (f"{name}={value!r}" for name, value, default in values if value != default and name != "config_files")
        return f"NeoXArgs({', '.join(texts)})"


NeoXArgs.register(MutableNeoXArgs)
NeoXArgs.mutable_class = MutableNeoXArgs


def _split_process_keys(values: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits `values` into (keys of the configuration, keys of PROCESS_KEYS)."""
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in (values or {}).items():
        parts[name in PROCESS_KEYS][name] = value
    return parts


def _values(args: NeoXArgs) -> dict[str, Any]:
    """Returns every key as plain lists and mappings: sections as the user wrote them, other keys resolved."""
    values = {name: getattr(args, name) for name in keys_of(NeoXArgs)}
    sections = {name: args.user_values[name] for name, key in keys_of(NeoXArgs).items()
                if key.section is not None and name in args.user_values}  # fmt: skip
    return {name: thaw(value) for name, value in (values | sections).items()}


def script_args(
    input_args: Sequence[str] | NeoXArgs | MutableNeoXArgs | None,
    overwrite_values: Mapping[str, Any] | None,
    prog: str,
    read_hf_model: ReadHFModel | None = None,
) -> NeoXArgs:
    """Returns the resolved configuration for a script's `main(input_args, overwrite_values)`.

    input_args: words of the script's command line (None: from sys.argv), the words that
    `get_deepspeed_main_args` returned, or a configuration that a program made.
    overwrite_values: keys that win over these.
    prog: the script's name, for messages.

    Raises ConfigError.
    """
    if isinstance(input_args, NeoXArgs | MutableNeoXArgs):
        args = input_args.frozen()
    else:
        if input_args is not None and LAUNCHER_FLAG in input_args:  # words before it are the launcher's
            input_args = input_args[input_args.index(ARGS_FLAG) :]
        args = parse_script(input_args, prog, read_hf_model)
    return args.replace(**overwrite_values) if overwrite_values else args
