"""Model parallelism (Megatron's `mpu`): process groups, linear layers sharded over tensor ranks, the output
layer and its loss.

groups.py: all process groups of a rank, as one frozen object. initialize.py creates and connects them.
mappings.py: the collectives of tensor, sequence and expert parallelism, with gradients. context.py: those of
context parallelism. gathered_keys.py: attention over keys of all context ranks.
parameters.py: `ParamSpec`, which describes a parameter and how it is sharded.
layers.py: the linear layer and the token embedding. parallel_linear.py: their column- and row-parallel
computation.
products.py: the matrix products of a linear layer; fp8/ and quantized.py have other versions. grouped.py: one
product per expert.
lora.py: low-rank adapters of a linear layer.
head.py: the output layer, and losses computed in chunks of tokens. cross_entropy.py: the loss of one chunk.
divergence.py: losses of distillation.
random.py: dropout seeds. gpu_kernels.py: the GPUs on which each kernel has been tested.

Functions and classes take their process groups as arguments; nothing here is global.
"""

from megatron.mpu.context import ContextRank, exchange_columns, exchange_heads, gather_keys
from megatron.mpu.cross_entropy import LossOfTokens, TokenLoss, compiled_kernels, plain_kernels
from megatron.mpu.divergence import Divergence, TopTokens, distillation_sums, token_divergence_sum, top_tokens
from megatron.mpu.gathered_keys import attend_in_parts
from megatron.mpu.grouped import grouped_mm
from megatron.mpu.groups import ParallelGroups, build_groups
from megatron.mpu.head import (
    HeadInput,
    OutputLayer,
    choose_tokens,
    scores_of,
    token_logprobs,
    token_logprobs_and_statistics,
    token_loss_sum,
    token_scores,
)
from megatron.mpu.initialize import check_experts, configured_groups, init_model_parallel, settle_context
from megatron.mpu.layers import Linear, LinearSpec, PartialSum, VocabParallelEmbedding, row_parallel_sum
from megatron.mpu.lora import LoraSpec, LowRank, adapters_of
from megatron.mpu.mappings import (
    all_gather,
    all_to_all,
    copy_to_tensor,
    exchange,
    gather_from_sequence,
    gather_from_sharers,
    gather_from_tensor,
    reduce_from_tensor,
    scatter_to_sequence,
)
from megatron.mpu.parameters import (
    DTYPES,
    ParamSpec,
    allocate,
    is_never_trained,
    is_precise,
    mark,
    shard,
    shard_rows,
    share_out,
    unshard,
    with_prefix,
)
from megatron.mpu.products import PlainProduct, Product, linear
from megatron.mpu.random import dropout, fork_seed, mix_seed, seed_tensor
