"""The fields of a resolved configuration, and properties computed from them."""

import json
from abc import ABCMeta
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.addresses import without_secrets_inside
from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.keys.data import DataKeys, TokenizerKeys
from megatron.neox_arguments.keys.deepspeed import DeadKeys, DeepspeedKeys, MadeKeys
from megatron.neox_arguments.keys.evaluation import EvaluationKeys
from megatron.neox_arguments.keys.logging import LoggingKeys, TextgenKeys
from megatron.neox_arguments.keys.operations import OperationsKeys
from megatron.neox_arguments.keys.parallel import BatchKeys, RunnerKeys
from megatron.neox_arguments.keys.post_training import PostTrainingKeys
from megatron.neox_arguments.keys.serving import ServingKeys
from megatron.neox_arguments.keys.training import CheckpointKeys, OptimizerKeys, TrainingKeys
from megatron.neox_arguments.methods import declarations
from megatron.neox_arguments.model_args import ModelArgs
from megatron.neox_arguments.values.remote_paths import is_remote, staging_folder

ARGS_FLAG = "--neox-args"  # hands a rank the file of `ResolvedArgs.to_json`


if TYPE_CHECKING:

    class AllMethodKeys:
        """The keys of all kinds of training; only their own code reads them, by `MethodKeys.read_from`."""

else:
    AllMethodKeys = dataclass(frozen=True)(
        type("AllMethodKeys", tuple(declared.keys for declared in declarations() if declared.keys)[::-1], {})
    )


@dataclass(frozen=True)
class ResolvedArgs(
    DeadKeys, MadeKeys, AllMethodKeys, PostTrainingKeys, ServingKeys, EvaluationKeys, TextgenKeys, OperationsKeys,
    LoggingKeys, TokenizerKeys, DataKeys, CheckpointKeys, TrainingKeys, OptimizerKeys, DeepspeedKeys, BatchKeys,
    ModelArgs, RunnerKeys, metaclass=ABCMeta,
):  # fmt: skip
    """Every key as a read-only attribute, with its value resolved; programs use its subclass `NeoXArgs`."""

    def to_json(self) -> str:
        """Returns JSON from which `from_json` makes the same object in another process."""
        state = {"given": self.user_values, "origins": self.origins, "config_files": self.config_files}
        return json.dumps({**state, "world_size": self.world_size}, indent=1)

    @property
    def public_values(self) -> dict[str, Any]:
        """The keys that the user set, as JSON values, without the secrets of URLs: for files that others may
        read."""
        return without_secrets_inside(json.loads(json.dumps(self.user_values)))

    @property
    def public_config_files(self) -> dict[str, str]:
        """The texts of the configuration files by path, without the secrets of URLs."""
        return without_secrets_inside(self.config_files)

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks. Raises ConfigError before `for_world`, which makes it known."""
        if self.world_size is None:
            raise ConfigError(["data_parallel_size is unknown: call args.for_world(world_size) first"])
        return self.world_size // (self.pp * self.tp * self.context_parallel_size)

    @property
    def first_step_limit_mins(self) -> float:
        """The minutes for ranks to wait for each other until the first step is done.

        Deep pipelines take long to begin: 22 stages on a Slingshot network took up to 90 minutes.
        """
        return self.first_step_timeout_mins or 30.0 + 3.0 * (self.pp - 1)

    @property
    def save_dir(self) -> str | None:
        """`save`, or the local staging folder of a remote `save`."""
        return self._local(self.save)

    @property
    def load_dir(self) -> str | None:
        """`load`, or the local staging folder of a remote `load`."""
        return self._local(self.load)

    def _local(self, path: str | None) -> str | None:
        return staging_folder(path, self.remote_staging) if path is not None and is_remote(path) else path

    @property
    def optimizer_name(self) -> str:
        """The kind of optimizer in lower case, as adam, adamw or sgd."""
        return self.optimizer["type"].lower()
