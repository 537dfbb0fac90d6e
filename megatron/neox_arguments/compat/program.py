"""A configuration that programs written for GPT-NeoX may write to: `from megatron import NeoXArgs`.

    args = NeoXArgs.from_ymls(["125M.yml", "local_setup.yml"])
    args.train_iters = 3
    train.main(args)

Entry points take one; nothing behind them ever does, only what `args.frozen()` gives.
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

# Keys that say what one process is: they stay on this object, as a configuration with them would differ by
# rank.
PROCESS_KEYS = ("user_script", "rank", "local_rank")
_OTHER_LAUNCHERS_WORLD_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")


class MutableNeoXArgs:
    """`NeoXArgs` as GPT-NeoX's programs know it: every key an attribute that can be written, sections as they
    were written in the files, lists as lists. `isinstance(args, NeoXArgs)` holds.

    What is written is checked for its name and type at once, and against the other keys by `frozen()`. Values
    derived from it, as lr_decay_iters from train_iters, follow there; properties and methods are those of the
    frozen object.
    """

    __dataclass_fields__ = NeoXArgs.__dataclass_fields__
    validate_keys = NeoXArgs.validate_keys

    def __init__(self, **values: Any) -> None:
        """The configuration of these keys, as `from_dict(values)`. Raises ConfigError."""
        resolved, process_values = _split_process_keys(values)
        self._set_values(load([], resolved, "program"), process_values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MutableNeoXArgs":
        """Resolve a mapping of keys (dotted paths and dashes allowed). Raises ConfigError."""
        return cls(**values)

    @classmethod
    def from_ymls(
        cls, paths_to_yml_files: Sequence[str | Path], overwrite_values: Mapping[str, Any] | None = None
    ) -> "MutableNeoXArgs":
        """The configuration of these files; overwrite_values win over them. Raises ConfigError."""
        values, process_values = _split_process_keys(overwrite_values)
        return cls._wrap(load(paths_to_yml_files, values, "overwrite_values"), process_values)

    @classmethod
    def consume_deepy_args(cls, input_args: Sequence[str] | None = None) -> "MutableNeoXArgs":
        """The configuration of a command line of deepy.py, `train.py a.yml b.yml`; sys.argv's. Raises
        ConfigError."""
        command = parse_deepy(input_args)
        return cls._wrap(command.args, {"user_script": command.user_script})

    @classmethod
    def consume_neox_args(
        cls, overwrite_values: Mapping[str, Any] | None = None, input_args: Sequence[str] | None = None
    ) -> "MutableNeoXArgs":
        """The configuration that a launcher handed to this process by `--neox-args FILE`; other words are not
        looked at. Raises ConfigError."""
        words = list(sys.argv if input_args is None else input_args)
        if ARGS_FLAG not in words:
            raise ConfigError([f"{ARGS_FLAG} FILE is not among the arguments: start this through deepy.py"])
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
        self.__dict__.update(_values(args), **process_values, _args=args, _before=_values(args))

    def __setattr__(self, name: str, value: Any) -> None:
        self.update_value(name, value)

    def update_value(self, key: str, value: Any) -> None:
        """Write a key. Raises ConfigError for a name that is none, and for a value of another type."""
        keys = keys_of(NeoXArgs)
        problems = ErrorCollector({})
        if key not in keys:
            problems.add(key, unknown(key, keys))
        elif value is not None:
            check_value(keys[key], key, value, problems)
        problems.raise_if_any()
        self.__dict__[key] = value

    def update_values(self, values: Mapping[str, Any]) -> None:
        """Write several keys, each with `update_value`. Raises ConfigError."""
        for key, value in values.items():
            self.update_value(key, value)

    def configure_distributed_args(self) -> None:
        """Set rank, local_rank, world_size and the batch sizes from RANK, LOCAL_RANK and WORLD_SIZE, as
        deepy.py and torchrun set them; a process without them is alone. Raises ConfigError for values that
        are no numbers or cannot be divided among the ranks."""
        env = os.environ
        variable = next((name for name in _OTHER_LAUNCHERS_WORLD_SIZES if env.get(name, "1") != "1"), None)
        if variable is not None and "RANK" not in env:
            raise ConfigError([
                f"{variable} is {env[variable]} in the environment, but RANK is not there; call "
                "megatron.launch.enter(args) first, which sets RANK, LOCAL_RANK and WORLD_SIZE under srun and mpirun"
            ])  # fmt: skip
        try:
            rank, local_rank, world_size = (
                int(env.get(name, alone)) for name, alone in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
            )
        except ValueError as cause:
            raise ConfigError([f"RANK, LOCAL_RANK, WORLD_SIZE in the environment: {cause}"]) from None
        process_values = {name: self.__dict__[name] for name in PROCESS_KEYS}
        self._set_values(self.frozen().for_world(world_size), process_values | {"rank": rank, "local_rank": local_rank})

    def frozen(self) -> NeoXArgs:
        """The resolved object with everything that was written, derived and validated anew. Raises
        ConfigError.

        A key that was set to None holds its default.
        """
        before = self._before
        changed = {
            name: value
            for name, value in ((name, self.__dict__.get(name)) for name in before)
            if name not in PROCESS_KEYS and value != before[name]
        }
        return self._args.replace(**changed) if changed else self._args

    def get_deepspeed_main_args(self) -> list[str]:
        """Words for DeepSpeed's launcher, which starts `user_script`, else train.py."""
        return self.frozen().get_deepspeed_main_args(self.user_script)

    def __getattr__(self, name: str) -> Any:
        """Properties and methods of the resolved object; keys are found before this is asked."""
        # A half-made object, as copy and pickle have it, has none; and many ask for names in the middle of
        # changes.
        if name.startswith("_") or not (hasattr(NeoXArgs, name) or name in self.__dataclass_fields__):
            raise AttributeError(f"NeoXArgs has no {name}")
        return getattr(self.frozen(), name)

    def __eq__(self, other: object) -> bool:
        """Whether every key resolves to the same value, wherever it was written. Raises ConfigError as
        `frozen`."""
        if not isinstance(other, NeoXArgs):
            return NotImplemented
        left, right = self.frozen(), other.frozen()
        keys = keys_of(NeoXArgs).keys() - {"config_files", *PROCESS_KEYS}
        return all(getattr(left, name) == getattr(right, name) for name in keys) and all(
            getattr(self, name) == getattr(other, name) for name in PROCESS_KEYS
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """`NeoXArgs(...)` with the keys whose values are not their defaults."""
        values = ((name, self.__dict__.get(name), key.default) for name, key in keys_of(NeoXArgs).items())
        shown = (f"{name}={value!r}" for name, value, default in values if value != default and name != "config_files")
        return f"NeoXArgs({', '.join(shown)})"


NeoXArgs.register(MutableNeoXArgs)
NeoXArgs.mutable_class = MutableNeoXArgs


def _split_process_keys(values: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the keys of the configuration, those of PROCESS_KEYS) among `values`."""
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in (values or {}).items():
        parts[name in PROCESS_KEYS][name] = value
    return parts


def _values(args: NeoXArgs) -> dict[str, Any]:
    """Every key as plain lists and mappings: sections as they were written, the rest as it was resolved."""
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
    """The resolved configuration that `main(input_args, overwrite_values)` of a script was called with.

    input_args: words of its command line (None: sys.argv's), those of `get_deepspeed_main_args`, or a
    configuration that a program made. prog: the script's name, for messages. Raises ConfigError.
    """
    if isinstance(input_args, NeoXArgs | MutableNeoXArgs):
        args = input_args.frozen()
    else:
        if input_args is not None and LAUNCHER_FLAG in input_args:  # what stands before it is for the launcher
            input_args = input_args[input_args.index(ARGS_FLAG) :]
        args = parse_script(input_args, prog, read_hf_model)
    return args.replace(**overwrite_values) if overwrite_values else args
