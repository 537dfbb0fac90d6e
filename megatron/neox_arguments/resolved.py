"""The fields of a resolved configuration, and what is read off them: everything that checks and reports need of it."""

import json
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.neox_arguments.errors import ConfigError, Problems
from megatron.neox_arguments.frozen import FrozenDict
from megatron.neox_arguments.keys.architectures import (
    MoEKeys,
    MuPKeys,
    OtherArchitectureKeys,
    TransformerEngineKeys,
)
from megatron.neox_arguments.keys.data import DataKeys, TokenizerKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.deepspeed import DeadKeys, DeepspeedKeys, MadeKeys
from megatron.neox_arguments.keys.evaluation import EvaluationKeys
from megatron.neox_arguments.keys.logging import LoggingKeys, TextgenKeys
from megatron.neox_arguments.keys.model import DROPOUT_KEYS, ModelKeys, PrecisionKeys
from megatron.neox_arguments.keys.parallel import BatchKeys, ParallelKeys, RunnerKeys
from megatron.neox_arguments.keys.post_training import PostTrainingKeys, UnlearningKeys
from megatron.neox_arguments.keys.serving import ServingKeys
from megatron.neox_arguments.keys.training import CheckpointKeys, OptimizerKeys, TrainingKeys
from megatron.neox_arguments.values.ffn_width import GATED, ffn_width
from megatron.neox_arguments.values.remote_paths import is_remote, staging_folder

ARGS_FLAG = "--neox-args"  # hands a rank the file of `ResolvedArgs.to_json`


@dataclass(frozen=True)
class ResolvedArgs(
    DeadKeys, MadeKeys, UnlearningKeys, PostTrainingKeys, OtherArchitectureKeys, MoEKeys, MuPKeys,
    TransformerEngineKeys, ServingKeys, EvaluationKeys, TextgenKeys, LoggingKeys, TokenizerKeys, DataKeys,
    CheckpointKeys, TrainingKeys, OptimizerKeys, DeepspeedKeys, BatchKeys, PrecisionKeys, ModelKeys, ParallelKeys,
    RunnerKeys, metaclass=ABCMeta,
):  # fmt: skip
    """Every key as a read-only attribute, with its value resolved; programs use its subclass `NeoXArgs`."""

    given: Mapping[str, Any] = field(default_factory=FrozenDict)
    """What the user wrote, unresolved; everything else is made from it."""
    origins: Mapping[str, str] = field(default_factory=FrozenDict)
    """Where it was written: `a.yml:12` by dotted path."""

    def origin(self, key: str) -> str:
        """Where the value of `key` (dotted for sub-keys) comes from: a place, "derived" or "default"."""
        place = Problems(self.origins).origin(key)
        name, *inner = key.split(".")
        if inner:
            given: Any = self.given
            for part in (name, *inner):
                given = given.get(part) if isinstance(given, Mapping) else None
            return place if place is not None and given is not None else "default"
        value = getattr(self, name)
        if place is None:
            return "default" if value == keys_of(type(self))[name].default else "derived"
        changed = value == 0.0 and name in ("gradient_clipping", *DROPOUT_KEYS) and self.given[name] != 0
        return f"derived from {place}" if changed else place

    def problem(self, key: str, text: str) -> ConfigError:
        """What is wrong with the value of `key`, beginning with where that stands."""
        return ConfigError([f"{self.origin(key)}: {key}: {text}"])

    def to_json(self) -> str:
        """Everything needed to make the same object in another process (`from_json`)."""
        state = {"given": self.given, "origins": self.origins, "config_files": self.config_files}
        return json.dumps({**state, "world_size": self.world_size}, indent=1)

    @property
    def pp(self) -> int:
        """Pipeline stages, at least 1."""
        return max(1, self.pipe_parallel_size)

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel ranks; only known after `for_world`."""
        if self.world_size is None:
            raise ConfigError(["data_parallel_size is only known after for_world(world_size)"])
        return self.world_size // (self.pp * self.tp)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation in GATED

    @property
    def ffn_size(self) -> int | tuple[int, ...]:
        """Inner width of the MLP, of each layer where they differ; a gated MLP has as many gate rows as up rows."""
        return ffn_width(self)

    @property
    def kv_heads(self) -> int | tuple[int, ...]:
        """Key-value heads, of each layer where they differ."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def softmax_rows(self) -> int | None:
        """Rows of the vocabulary that take part in the softmax, the first ones; None: all. Known once training has
        found out what `mask_padded_vocab: auto` and `true` mean."""
        rows = self.mask_padded_vocab
        return None if isinstance(rows, bool | str) else rows

    @property
    def params_dtype(self) -> str:
        """fp32, fp16 or bf16."""
        return {"bfloat16": "bf16"}.get(self.precision, self.precision)

    @property
    def save_dir(self) -> str | None:
        """`save`, or the folder of this machine that stands for a remote one."""
        return self._local(self.save)

    @property
    def load_dir(self) -> str | None:
        """`load`, or the folder of this machine that stands for a remote one."""
        return self._local(self.load)

    def _local(self, place: str | None) -> str | None:
        return staging_folder(place, self.remote_staging) if place is not None and is_remote(place) else place

    @property
    def optimizer_name(self) -> str:
        """adam, adamw or sgd."""
        return self.optimizer["type"].lower()
