"""The resolved configuration: one frozen object, made from files, overrides or a dictionary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.neox_arguments.compat.key_groups import key_group
from megatron.neox_arguments.compat.methods import GPTNeoXMethods
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.frozen import FrozenDict, freeze, thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.reading.files import RawConfig, parse_overrides, read_deepspeed_config, read_files
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.validation.consistency import (
    validate,
    validate_evaluation,
    validate_generation,
    validate_planning,
    validate_serving,
    validate_training,
)
from megatron.neox_arguments.validation.refusals import refusals
from megatron.neox_arguments.validation.startup_notes import startup_notes
from megatron.neox_arguments.validation.types import check_keys
from megatron.neox_arguments.values.batch_sizes import BATCH_KEYS, batch_sizes
from megatron.neox_arguments.values.derive import derive
from megatron.neox_arguments.values.json_text import parse_json


@dataclass(frozen=True)
class NeoXArgs(GPTNeoXMethods):
    """The resolved and validated configuration, with every key as a read-only attribute.

    `load`, `from_dict`, `replace` and `for_world` make such objects.
    """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "program") -> "NeoXArgs":
        """Resolves a mapping of keys (dotted paths and dashes allowed) into a configuration. Raises
        ConfigError."""
        return load([], values, origin)

    def frozen(self) -> "NeoXArgs":
        """Returns this object, which is read-only already. Entry points call `frozen` on their argument,
        which may also be a `MutableNeoXArgs`."""
        return self

    def replace(self, **changes: Any) -> "NeoXArgs":
        """Returns a new object with some keys changed (None: to the default), derived and validated again.

        Dotted paths reach into sections: `args.replace(**{"optimizer.params.lr": 1e-3})`. Raises ConfigError.
        """
        config = RawConfig(thaw(self.user_values), dict(self.origins), dict(self.config_files))
        for path, value in changes.items():
            config.assign(path, value, "program")
        args = _resolve(config)
        return args if self.world_size is None else args.for_world(self.world_size)

    def settle(self, key: str, value: Any) -> "NeoXArgs":
        """Returns a new object in which `key`, which was `auto`, has the chosen `value`. Messages about the
        key still name the line that set `auto`."""
        settled = self.replace(**{key: value})
        return replace(settled, origins=FrozenDict({**settled.origins, key: self.origin(key)}))

    @property
    def optimizer_bytes(self) -> int:
        """An estimate of the bytes of optimizer state per trained parameter.

        They are Adam's moments, the master of a 16-bit weight, and the average of `ema_decay`, all in fp32.
        """
        return 8 + (4 if self.params_dtype != "fp32" else 0) + (4 if self.ema_decay is not None else 0)

    def for_world(self, world_size: int) -> "NeoXArgs":
        """Returns the configuration with batch sizes and data_parallel_size computed for `world_size` ranks.

        Raises ConfigError if the layout or the batch sizes do not fit.
        """
        model_parallel, context = self.pp * self.tp, self.context_parallel_size
        replica = model_parallel * context
        problems = ErrorCollector(self.origins)
        if world_size < 1 or world_size % replica:
            product = f"pipe_parallel_size {self.pp} x model_parallel_size {self.tp}"
            product += f" x context_parallel_size {context}" if context > 1 else ""
            key = "context_parallel_size" if context > 1 else "model_parallel_size"
            problems.add(
                "pipe_parallel_size" if self.pp > 1 else key,
                f"{world_size} ranks cannot be divided into {product} = {replica}; start a multiple of {replica} ranks "
                "or change these keys",
            )
            problems.raise_if_any()
        if world_size // model_parallel % self.expert_parallel_size:
            ranks = "data-parallel ranks" if context == 1 else "data- and context-parallel ranks"
            problems.add(
                "expert_parallel_size",
                f"{self.expert_parallel_size} does not divide the {world_size // model_parallel} {ranks}; "
                "set a divisor",
            )
            problems.raise_if_any()
        batch = (self.user_values.get(name) for name in BATCH_KEYS)
        try:
            sizes = batch_sizes(world_size // replica, *batch)
        except ValueError as cause:
            key, *other_keys = [name for name in BATCH_KEYS if self.user_values.get(name) is not None]
            origins = "".join(f" ({name}: {self.origin(name)})" for name in other_keys)
            problems.add(key, f"{cause}{origins}")
            problems.raise_if_any()
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        world_values = {"batch_size": sizes.get("train_micro_batch_size_per_gpu"), "world_size": world_size}
        return NeoXArgs(**{**values, **sizes, **world_values})

    def for_inference(self, world_size: int) -> "NeoXArgs":
        """Returns the configuration for a command that trains nothing, on `world_size` ranks.

        Batch sizes are unset, because `world_size` might not divide them. Each rank has all experts, and full
        rows. Raises ConfigError.
        """
        return self.replace(
            train_batch_size=None, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None,
            expert_parallel_size=1, context_parallel_size=1,
        ).for_world(world_size)  # fmt: skip

    def startup_notes(self) -> list[str]:
        """Returns lines to print once at start: keys without effect, and differences from GPT-NeoX."""
        return startup_notes(self)

    def check_training(self) -> "NeoXArgs":
        """Returns this object if all keys that training needs are set and valid. Raises ConfigError."""
        return self._check(validate_training(self))

    def check_planning(self) -> "NeoXArgs":
        """Returns this object if `deepy.py plan` can read the model and its batch from it. Raises
        ConfigError."""
        return self._check(validate_planning(self))

    def check_generation(self) -> "NeoXArgs":
        """Returns this object if all keys that text generation needs are set and valid. Raises
        ConfigError."""
        # Values that only matter in training are allowed here.
        return self._check(validate_generation(self), allowed=("train_impl", "dataset_impl"))

    def check_evaluation(self) -> "NeoXArgs":
        """Returns this object if all keys that evaluation needs are set and valid. Raises ConfigError."""
        return self._check(validate_evaluation(self))

    def check_serving(self) -> "NeoXArgs":
        """Returns this object if all keys that tools/serve.py needs are set and valid. Raises ConfigError."""
        return self._check(validate_serving(self))

    def check_for(self, script: str | Path) -> "NeoXArgs":
        """Returns this object if it has all keys that `script` needs: train.py, eval.py, generate.py or
        serve.py.

        For any other script nothing is checked. Raises ConfigError.
        """
        checks = {
            "train": self.check_training,
            "eval": self.check_evaluation,
            "generate": self.check_generation,
            "serve": self.check_serving,
        }
        return checks.get(Path(script).stem, lambda: self)()

    def refusals(self) -> dict[str, str]:
        """Returns the values that a run refuses: for each dotted path the reason and the fix; {} if there are
        none."""
        return refusals(self)

    def _check(self, problems: ErrorCollector, allowed: Sequence[str] = ()) -> "NeoXArgs":
        for path, reason in self.refusals().items():
            if path not in allowed:
                problems.add(path, reason)
        problems.raise_if_any()
        return self

    @classmethod
    def from_json(cls, text: str) -> "NeoXArgs":
        """Returns the object whose `to_json` wrote this text.

        Raises ConfigError, and ValueError or KeyError for any other text.
        """
        state = parse_json(text)
        args = _resolve(RawConfig(state["given"], state["origins"], state["config_files"]))
        return args if state["world_size"] is None else args.for_world(state["world_size"])


def load(
    files: Sequence[str | Path], overrides: Mapping[str, Any] | Sequence[str] = (), origin: str = "--set"
) -> NeoXArgs:
    """Merges YAML and JSON files, applies overrides (`{"a.b": 1}` or `["a.b=1"]`), and resolves the result.

    origin: the place of the overrides, for messages. Raises ConfigError with one line for every problem of
    all files together.
    """
    return load_assignments(files, parse_overrides(overrides, origin))


def load_assignments(files: Sequence[str | Path], assignments: Sequence[tuple[str, Any, str]]) -> NeoXArgs:
    """Merges files, applies overrides given as (dotted path, value, origin), and resolves the result. Raises
    ConfigError."""
    config = read_files(files)
    for path, value, origin in assignments:
        config.assign(path, value, origin)
    read_deepspeed_config(config, keys_of(ResolvedArgs).__contains__)
    return _resolve(config)


def check_assignments(assignments: Sequence[tuple[str, Any, str]]) -> None:
    """Raises ConfigError for unknown and missing keys, and for values of a wrong type or outside the bounds.

    Whether keys fit together is not checked. assignments: (dotted path, value, origin).
    """
    config = read_files([])
    for path, value, origin in assignments:
        config.assign(path, value, origin)
    problems = ErrorCollector(config.origins)
    check_keys(ResolvedArgs, config.values, problems)
    problems.raise_if_any()


def _resolve(config: RawConfig) -> NeoXArgs:
    problems = ErrorCollector(config.origins)
    problems.lines += config.problems
    problems.complete = not config.unread
    values = check_keys(ResolvedArgs, config.values, problems)
    problems.raise_if_any()
    values = derive(values, keys_of(ResolvedArgs), config.values, problems)
    problems.raise_if_any()
    extra = {"config_files": config.config_files, "user_values": config.values, "origins": config.origins}
    args = NeoXArgs(**{**values, **freeze(extra)})
    validate(args).raise_if_any()
    return args


def __getattr__(name: str) -> type:
    """Returns the dataclass of one of GPT-NeoX's key groups by its name, such as `NeoXArgsTokenizer`.
    Programs for GPT-NeoX import it from this module."""
    return key_group(name, __name__)
