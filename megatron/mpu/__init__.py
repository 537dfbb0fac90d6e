"""Model parallelism (Megatron's `mpu`): process groups, layers split over tensor ranks, the output layer and
its loss.

`groups.py` holds the process groups as one frozen object, `mappings.py` the collectives, `parameters.py` the
specs of parameters. `layers.py` has the linear layer, `parallel_linear.py` its columns and rows over tensor
ranks, `products.py` its matrix product, `grouped.py` products by group. `head.py` has the output layer and
its loss in chunks, `cross_entropy.py` the loss of a chunk of logits over tensor ranks. `random.py` derives
seeds of dropout, `gpu_kernels.py` lists the GPUs on which each kernel has run.

Everything takes its groups as an argument; nothing here is global.
"""

from megatron.mpu.cross_entropy import TokenLoss, compiled_kernels, plain_kernels
from megatron.mpu.divergence import Divergence, TopTokens, distillation_sums, token_divergence_sum, top_tokens
from megatron.mpu.grouped import grouped_mm
from megatron.mpu.groups import ParallelGroups, build_groups
from megatron.mpu.head import (
    HeadInput,
    LossOfTokens,
    OutputLayer,
    choose_tokens,
    scores_of,
    token_logprobs,
    token_logprobs_and_statistics,
    token_loss_sum,
    token_scores,
)
from megatron.mpu.initialize import init_model_parallel
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
