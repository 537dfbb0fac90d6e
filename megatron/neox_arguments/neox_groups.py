"""GPT-NeoX's groups of keys by its names: `NeoXArgsTokenizer.tokenizer_type` is the default of that key.

Our groups are cut otherwise. Each class here declares every key that GPT-NeoX's class of that name declares, and the
neighbours of those keys.
"""

from dataclasses import dataclass

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

NeoXArgsMoE = MoEKeys
NeoXArgsLRScheduler = OptimizerKeys


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsDeepspeedRunner(RunnerKeys, DeepspeedKeys):
    """How DeepSpeed's launcher starts ranks."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsDeepspeedConfig(DeepspeedKeys, BatchKeys, OptimizerKeys, PrecisionKeys, ParallelKeys):
    """What DeepSpeed's configuration holds."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsModel(
    ModelKeys, PrecisionKeys, TransformerEngineKeys, OtherArchitectureKeys, PostTrainingKeys, DeadKeys
):  # fmt: skip
    """The shape of the model and its layers."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsOptimizer(OptimizerKeys, MadeKeys):
    """The optimizer."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsTokenizer(TokenizerKeys, ModelKeys):
    """The tokenizer and its vocabulary."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsTraining(
    TrainingKeys, CheckpointKeys, DataKeys, TokenizerKeys, OptimizerKeys, PostTrainingKeys, UnlearningKeys, MuPKeys,
    ModelKeys, MadeKeys,
):  # fmt: skip
    """Data, checkpoints and the course of training."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsParallelism(ParallelKeys, MadeKeys):
    """How the model is split."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsLogging(LoggingKeys, MadeKeys):
    """What is logged, and where to."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsTextgen(TextgenKeys, EvaluationKeys, PostTrainingKeys):
    """Text generation and evaluation."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class NeoXArgsOther(
    ParallelKeys, TrainingKeys, DataKeys, CheckpointKeys, RunnerKeys, DeadKeys, MadeKeys
):  # fmt: skip
    """Ranks, seeds and what is left."""


GROUPS = (
    NeoXArgsDeepspeedRunner, NeoXArgsDeepspeedConfig, NeoXArgsModel, NeoXArgsMoE, NeoXArgsLRScheduler,
    NeoXArgsOptimizer, NeoXArgsTokenizer, NeoXArgsTraining, NeoXArgsParallelism, NeoXArgsLogging, NeoXArgsTextgen,
    NeoXArgsOther,
)  # fmt: skip
