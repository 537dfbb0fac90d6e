"""Model parallelism: the frozen object of process groups, the autograd-aware collectives of tensor and sequence
parallelism, what a parameter is, the one linear layer, vocab-parallel cross-entropy, the random seeds of dropout,
meeting and comparing ranks, joining the process group, work that ranks do for each other, and the watch over ranks that
do not move.
Everything takes its groups as an argument; nothing here is global."""

from megatron.mpu.cross_entropy import (
    token_logprobs,
    token_logprobs_and_statistics,
    token_logprobs_and_sums,
)
from megatron.mpu.distributed import configure_logging, join, on_rank_zero, together, together_in, together_local
from megatron.mpu.dtypes import DTYPES
from megatron.mpu.groups import AXES, ParallelGroups, build_groups
from megatron.mpu.handshake import meet
from megatron.mpu.head import HeadInput
from megatron.mpu.layers import Linear, LinearSpec, VocabParallelEmbedding
from megatron.mpu.mappings import (
    copy_to_tensor,
    gather_from_sequence,
    gather_from_tensor,
    reduce_from_tensor,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)
from megatron.mpu.parameters import ParamSpec, allocate, shard, under, unshard
from megatron.mpu.random import dropout, fork_seed, mix_seed, seeded
from megatron.mpu.rendezvous import Process, StartError
from megatron.mpu.transport import check_transport
from megatron.mpu.watchdog import Watchdog

__all__ = [
    "AXES",
    "DTYPES",
    "HeadInput",
    "Linear",
    "LinearSpec",
    "ParamSpec",
    "ParallelGroups",
    "Process",
    "StartError",
    "VocabParallelEmbedding",
    "Watchdog",
    "allocate",
    "build_groups",
    "check_transport",
    "configure_logging",
    "copy_to_tensor",
    "dropout",
    "fork_seed",
    "gather_from_sequence",
    "gather_from_tensor",
    "join",
    "meet",
    "mix_seed",
    "on_rank_zero",
    "reduce_from_tensor",
    "reduce_scatter_to_sequence",
    "scatter_to_sequence",
    "seeded",
    "shard",
    "together",
    "together_in",
    "together_local",
    "token_logprobs",
    "token_logprobs_and_statistics",
    "token_logprobs_and_sums",
    "under",
    "unshard",
]
