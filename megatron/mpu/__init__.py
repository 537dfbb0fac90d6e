"""Model parallelism (Megatron's `mpu`): `groups.py` holds the process groups as one frozen object,
`layers.py` the column- and row-parallel linear layer, `mappings.py` the collectives with gradients under it,
`parameters.py` what a parameter is, `cross_entropy.py` the vocab-parallel loss, `random.py` the seeds of
dropout.

Everything takes its groups as an argument; nothing here is global.
"""

from megatron.mpu.cross_entropy import (
    token_logprobs,
    token_logprobs_and_statistics,
    token_logprobs_and_sums,
)
from megatron.mpu.dtypes import DTYPES
from megatron.mpu.groups import AXES, ParallelGroups, build_groups
from megatron.mpu.head import HeadInput
from megatron.mpu.initialize import init_model_parallel
from megatron.mpu.layers import Linear, LinearSpec, VocabParallelEmbedding
from megatron.mpu.mappings import (
    copy_to_tensor,
    gather_from_sequence,
    gather_from_tensor,
    reduce_from_tensor,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)
from megatron.mpu.parameters import ParamSpec, allocate, shard, shard_rows, unshard, with_prefix
from megatron.mpu.random import dropout, fork_seed, mix_seed, seed_tensor, seeded

__all__ = [
    "AXES",
    "DTYPES",
    "HeadInput",
    "Linear",
    "LinearSpec",
    "ParamSpec",
    "ParallelGroups",
    "VocabParallelEmbedding",
    "allocate",
    "build_groups",
    "copy_to_tensor",
    "dropout",
    "fork_seed",
    "gather_from_sequence",
    "gather_from_tensor",
    "init_model_parallel",
    "mix_seed",
    "reduce_from_tensor",
    "reduce_scatter_to_sequence",
    "scatter_to_sequence",
    "seed_tensor",
    "seeded",
    "shard",
    "shard_rows",
    "token_logprobs",
    "token_logprobs_and_statistics",
    "token_logprobs_and_sums",
    "with_prefix",
    "unshard",
]
