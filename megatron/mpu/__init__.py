"""Model parallelism (Megatron's `mpu`): `groups.py` holds the process groups as one frozen object,
`layers.py` the linear layer, `parallel_linear.py` its columns and rows over tensor ranks, `products.py` what
it multiplies with, `mappings.py` the collectives, `parameters.py` what a parameter is, `head.py` the output
layer and its loss in chunks, `cross_entropy.py` what is done to the logits of a chunk over tensor ranks,
`random.py` the seeds of dropout.

Everything takes its groups as an argument; nothing here is global.
"""

from megatron.mpu.cross_entropy import TokenLoss, compiled_kernels, plain_kernels
from megatron.mpu.divergence import Divergence, TopTokens, distillation_sums, token_divergence_sum, top_tokens
from megatron.mpu.dtypes import DTYPES
from megatron.mpu.groups import AXES, ParallelGroups, build_groups
from megatron.mpu.head import (
    HeadInput,
    LossOfTokens,
    OutputLayer,
    TokenStatistics,
    scores_of,
    token_logprobs,
    token_logprobs_and_statistics,
    token_loss_sum,
    token_scores,
)
from megatron.mpu.initialize import init_model_parallel
from megatron.mpu.layers import Linear, LinearSpec, VocabParallelEmbedding, row_parallel_sum
from megatron.mpu.lora import LoraSpec, adapters_of
from megatron.mpu.mappings import (
    copy_to_tensor,
    gather_from_sequence,
    gather_from_tensor,
    reduce_from_tensor,
    scatter_to_sequence,
)
from megatron.mpu.parameters import ParamSpec, allocate, shard, shard_rows, unshard, with_prefix
from megatron.mpu.products import PlainProduct, Product, linear
from megatron.mpu.random import dropout, fork_seed, mix_seed, seed_tensor

__all__ = [
    "AXES",
    "DTYPES",
    "Divergence",
    "HeadInput",
    "Linear",
    "LinearSpec",
    "LoraSpec",
    "LossOfTokens",
    "OutputLayer",
    "ParamSpec",
    "ParallelGroups",
    "PlainProduct",
    "Product",
    "TokenLoss",
    "TokenStatistics",
    "TopTokens",
    "VocabParallelEmbedding",
    "adapters_of",
    "allocate",
    "build_groups",
    "compiled_kernels",
    "copy_to_tensor",
    "distillation_sums",
    "dropout",
    "fork_seed",
    "gather_from_sequence",
    "gather_from_tensor",
    "init_model_parallel",
    "linear",
    "mix_seed",
    "plain_kernels",
    "reduce_from_tensor",
    "row_parallel_sum",
    "scatter_to_sequence",
    "scores_of",
    "seed_tensor",
    "shard",
    "shard_rows",
    "token_divergence_sum",
    "token_logprobs",
    "token_logprobs_and_statistics",
    "token_loss_sum",
    "token_scores",
    "top_tokens",
    "with_prefix",
    "unshard",
]
