"""GPT-NeoX's groups of keys by its names: `NeoXArgsTokenizer.tokenizer_type` is the default of that key.

Our groups are cut otherwise. Each class here declares every key that GPT-NeoX's class of that name declares, and the
neighbours of those keys.
"""

from collections.abc import Mapping
from dataclasses import make_dataclass

from megatron.neox_arguments.keys_architectures import (
    MoEKeys,
    MuPKeys,
    OtherArchitectureKeys,
    TransformerEngineKeys,
)
from megatron.neox_arguments.keys_data import DataKeys, TokenizerKeys
from megatron.neox_arguments.keys_deepspeed import DeadKeys, DeepspeedKeys, MadeKeys
from megatron.neox_arguments.keys_evaluation import EvaluationKeys
from megatron.neox_arguments.keys_logging import LoggingKeys, TextgenKeys
from megatron.neox_arguments.keys_model import ModelKeys, PrecisionKeys
from megatron.neox_arguments.keys_parallel import BatchKeys, ParallelKeys, RunnerKeys
from megatron.neox_arguments.keys_post_training import PostTrainingKeys, UnlearningKeys
from megatron.neox_arguments.keys_training import CheckpointKeys, OptimizerKeys, TrainingKeys

_BASES: Mapping[str, tuple[type, ...]] = {
    "NeoXArgsDeepspeedRunner": (RunnerKeys, DeepspeedKeys),
    "NeoXArgsDeepspeedConfig": (DeepspeedKeys, BatchKeys, OptimizerKeys, PrecisionKeys, ParallelKeys),
    "NeoXArgsModel": (
        ModelKeys, PrecisionKeys, TransformerEngineKeys, OtherArchitectureKeys, PostTrainingKeys, DeadKeys,
    ),
    "NeoXArgsMoE": (MoEKeys,),
    "NeoXArgsLRScheduler": (OptimizerKeys,),
    "NeoXArgsOptimizer": (OptimizerKeys, MadeKeys),
    "NeoXArgsTokenizer": (TokenizerKeys, ModelKeys),
    "NeoXArgsTraining": (
        TrainingKeys, CheckpointKeys, DataKeys, TokenizerKeys, OptimizerKeys, PostTrainingKeys, UnlearningKeys,
        MuPKeys, ModelKeys, MadeKeys,
    ),
    "NeoXArgsParallelism": (ParallelKeys, MadeKeys),
    "NeoXArgsLogging": (LoggingKeys, MadeKeys),
    "NeoXArgsTextgen": (TextgenKeys, EvaluationKeys, PostTrainingKeys),
    "NeoXArgsOther": (ParallelKeys, TrainingKeys, DataKeys, CheckpointKeys, RunnerKeys, DeadKeys, MadeKeys),
}  # fmt: skip
GROUPS: Mapping[str, type] = {
    name: make_dataclass(name, (), bases=bases, frozen=True, init=False, repr=False, eq=False)
    for name, bases in _BASES.items()
}
