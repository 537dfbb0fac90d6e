"""What programs written for GPT-NeoX call on NeoXArgs, by its names; `program.ProgramArgs` is what they write to."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.neox_arguments.declare import REQUIRED, keys_of
from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.frozen import thaw

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs
    from megatron.neox_arguments.program import ProgramArgs

ARGS_FLAG = "--neox-args"
LAUNCHER_WORD = "--no_local_rank"  # DeepSpeed's launcher adds no flag of its own to the script's
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
    ) -> "ProgramArgs":
        """As `load`, for a program to write to; overwrite_values win over the files. Raises ConfigError."""
        from megatron.neox_arguments.program import ProgramArgs

        return ProgramArgs.from_ymls(paths_to_yml_files, overwrite_values)

    @classmethod
    def consume_deepy_args(cls, input_args: Sequence[str] | None = None) -> "ProgramArgs":
        """The configuration of a command line of deepy.py, `train.py a.yml b.yml`; sys.argv's. Raises ConfigError."""
        from megatron.neox_arguments.program import ProgramArgs

        return ProgramArgs.consume_deepy_args(input_args)

    @classmethod
    def consume_neox_args(
        cls, overwrite_values: Mapping[str, Any] | None = None, input_args: Sequence[str] | None = None
    ) -> "ProgramArgs":
        """The configuration that a launcher handed to this process by `--neox-args FILE`; other words are not looked
        at. Raises ConfigError."""
        from megatron.neox_arguments.program import ProgramArgs

        return ProgramArgs.consume_neox_args(overwrite_values, input_args)

    def get_deepspeed_main_args(self: "NeoXArgs", user_script: str | None = None) -> list[str]:  # type: ignore[misc]
        """Words for DeepSpeed's launcher (`deepspeed.launcher.runner.main`): its flags, the script (train.py) and the
        configuration in a file of the temporary folder."""
        with tempfile.NamedTemporaryFile("w", prefix="neox_args.", suffix=".json", delete=False) as file:
            file.write(self.to_json())
        flags = [f"--{name}={getattr(self, name)}" for name in _RUNNER if self.origin(name) != "default"]
        flags += [f"--{name}" for name in _SWITCHES if getattr(self, name)]
        return [*flags, LAUNCHER_WORD, user_script or self.user_script or "train.py", ARGS_FLAG, file.name]

    @property
    def megatron_config(self) -> dict[str, Any]:
        """Every key whose value is not the default, as plain lists and mappings."""
        values = {name: (getattr(self, name), known.default) for name, known in keys_of(type(self)).items()}
        return {name: thaw(value) for name, (value, default) in values.items() if value != default}

    def update_value(self, key: str, value: Any) -> NoReturn:
        """Raises TypeError: a resolved configuration is never written to."""
        raise TypeError(f"a resolved NeoXArgs is read-only: write args = args.replace({key}={value!r}) for a new one")

    def configure_distributed_args(self) -> NoReturn:
        """Raises TypeError: a resolved configuration is never written to."""
        raise TypeError("a resolved NeoXArgs is read-only: write args = args.for_world(world_size) for a new one")

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


def group(name: str, module: str) -> type:
    """GPT-NeoX's group of keys of this name, read only when it is asked for. Raises AttributeError as a module does."""
    if name.startswith("NeoXArgs"):
        from megatron.neox_arguments.neox_groups import GROUPS

        if name in GROUPS:
            return GROUPS[name]
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
