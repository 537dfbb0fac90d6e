"""Pipelines of the native engine on fake CUDA: no wait, and every rank receives what its neighbours send."""

import math
from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from megatron.model import layer_params
from megatron.neox_arguments import NeoXArgs
from tests.fake.checks import clean
from tests.fake.client import FakeCuda
from tests.fake.layouts import HIDDEN, MICRO_BATCH, MODEL, PP2, RECOMPUTE, SEQ, SP2, Case
from tests.marks import with_more

MICRO_BATCHES = 3
SMALL: dict[str, Any] = {**SP2, "gradient_accumulation_steps": MICRO_BATCHES}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"ZeRO {stage}": {**SMALL, **PP2, "zero_optimization": {"stage": stage}} for stage in range(4)
}
LAYOUTS["4 stages, recompute"] = {**SMALL, **RECOMPUTE, "pipe_parallel_size": 4, "num_layers": 4}
DEEP: dict[str, Any] = {**SMALL, "num_layers": 8, "pipe_parallel_size": 4, "gradient_accumulation_steps": 8}
STAGES_OF: dict[str, list[list[int]]] = {  # by rank
    "interleaved": [[rank, rank + 4] for rank in range(4)], "zero_bubble": [[rank] for rank in range(4)],
    "zbv": [[rank, 7 - rank] for rank in range(4)], "dualpipev": [[rank, 7 - rank] for rank in range(4)],
}  # fmt: skip
# 88 blocks, of which 11 attend and 33 have experts: 126 billion parameters.
STAGES, EXPERT_RANKS, BIG_HIDDEN, BIG_SEQ = 22, 4, 4096, 6144
MIXERS = ["mamba2", "moe", "mamba2", "moe", "mamba2", "moe", "mamba2", "attention"]
HYBRID_120B: dict[str, Any] = {
    "num_layers": 88, "attention_config": [[MIXERS, 11]],
    "hidden_size": BIG_HIDDEN, "num_attention_heads": 32, "num_kv_heads": 2, "head_dim": 128, "pos_emb": "none",
    "mamba_num_groups": 8, "mamba_head_dim": 64, "mamba_state_dim": 128, "moe_num_experts": 128, "moe_top_k": 6,
    "moe_intermediate_size": 2304, "moe_router_type": "topk", "seq_length": BIG_SEQ, "padded_vocab_size": 131072,
    "max_position_embeddings": BIG_SEQ, "train_micro_batch_size_per_gpu": 1,
    "pipe_parallel_size": STAGES, "expert_parallel_size": EXPERT_RANKS,
    "zero_optimization": {"stage": 1}, **RECOMPUTE,
}  # fmt: skip

LLAMA_70B: dict[str, Any] = {
    "num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672,
    "compat_ffn_width": "none", "activation": "swiglu", "norm": "rmsnorm", "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False, "seq_length": BIG_SEQ, "max_position_embeddings": BIG_SEQ, "padded_vocab_size": 128256,
    "train_micro_batch_size_per_gpu": 1, "model_parallel_size": 8, "sequence_parallel": True, "pipe_parallel_size": 8,
    "pipeline_schedule": "interleaved", "gradient_accumulation_steps": 8, **RECOMPUTE,
}  # fmt: skip


def messages(report: dict[str, Any], kind: str) -> dict[tuple[int, int], list[int]]:
    """Bytes of the sends or receives of a step, in order, by the pair of ranks."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for lower_rank, stride, _, name, size in report["collectives"]:
        if name == kind:
            sizes.setdefault((lower_rank, lower_rank + stride), []).append(size)
    return sizes


@pytest.mark.parametrize("schedule", with_more(STAGES_OF, "interleaved", product=STAGES_OF.keys() - {"interleaved"}))
def test_receives_meet_sends_under_each_schedule(schedule: str, fake_cuda: FakeCuda) -> None:
    """Every boundary between stages of different ranks carries each micro-batch once each way."""
    values, stages = {**DEEP, "pipeline_schedule": schedule}, STAGES_OF[schedule]
    reports = [clean(fake_cuda, Case(16, 1 + 4 * rank, values, native=True)) for rank in range(4)]
    rank_of = {stage: rank for rank, rank_stages in enumerate(stages) for stage in rank_stages}
    sends, receives = ([messages(report, kind) for report in reports] for kind in ("send", "receive"))
    for rank, peer in combinations(range(4), 2):
        pair = (1 + 4 * rank, 1 + 4 * peer)
        crossing = sum({rank_of[stage], rank_of[stage + 1]} == {rank, peer} for stage in range(len(rank_of) - 1))
        assert sends[rank].get(pair) == receives[peer].get(pair) and sends[peer].get(pair) == receives[rank].get(pair)
        total = len(sends[rank].get(pair, [])) + len(sends[peer].get(pair, []))
        assert total == 2 * 8 * crossing, (schedule, pair)


@pytest.mark.parametrize("name", with_more(LAYOUTS, "ZeRO 0", product=LAYOUTS.keys() - {"ZeRO 0", "ZeRO 3"}))
def test_receives_meet_sends(name: str, fake_cuda: FakeCuda) -> None:
    """All stages of one tensor and data rank exchange messages with their neighbours, and with no other."""
    values = LAYOUTS[name]
    ranks = range(1, 4 * values["pipe_parallel_size"], 4)  # two tensor ranks, two data ranks
    reports = {rank: clean(fake_cuda, Case(4 * len(ranks), rank, values, native=True)) for rank in ranks}
    sends, receives = ({rank: messages(reports[rank], kind) for rank in ranks} for kind in ("send", "receive"))
    size = 2 * SEQ // 2 * MICRO_BATCH * HIDDEN
    for rank in ranks:
        neighbours = {rank - 4, rank + 4} & set(ranks)
        assert sends[rank].keys() == {tuple(sorted((rank, neighbour))) for neighbour in neighbours}
        for pair, sizes in sends[rank].items():
            assert sizes == receives[sum(pair) - rank][pair] == [size] * MICRO_BATCHES, (rank, pair)


def test_the_hybrid_has_120_billion_parameters() -> None:
    args = NeoXArgs.from_dict({**MODEL, **HYBRID_120B})
    sizes = [math.prod(param.shape) for params in layer_params(args).values() for param in params]
    assert 120e9 < sum(sizes) < 127e9


@pytest.mark.product
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [0, 10, 21])
def test_a_hybrid_of_120b_on_22_stages(stage: int, fake_cuda: FakeCuda) -> None:
    """With as many micro-batches as the stage ever holds at a time."""
    rank, micro_batches = stage * EXPERT_RANKS + 1, STAGES - stage
    values = {**HYBRID_120B, "gradient_accumulation_steps": micro_batches}
    report = clean(fake_cuda, Case(STAGES * EXPERT_RANKS, rank, values, native=True))
    pairs = [(rank - EXPERT_RANKS, rank)] * (stage > 0) + [(rank, rank + EXPERT_RANKS)] * (stage < STAGES - 1)
    for kind in ("send", "receive"):
        assert messages(report, kind) == {pair: [2 * BIG_SEQ * BIG_HIDDEN] * micro_batches for pair in pairs}
    assert max(report["construction"], report["peak"]) < 80e9 * 0.9


@pytest.mark.product
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_interleaved_stages_of_70b(rank: int, fake_cuda: FakeCuda) -> None:
    """Eight tensor ranks, eight pipeline ranks with two stages of five blocks each."""
    place = 8 * rank + 1
    report = clean(fake_cuda, Case(64, place, LLAMA_70B, native=True))
    boundaries = Counter(tuple(sorted((8 * ((rank + way) % 8) + 1, place))) for way in (-1, 1))
    ring_pair = (1, 57)  # from the last rank to the first
    for kind in ("send", "receive"):
        counts = {pair: len(sizes) for pair, sizes in messages(report, kind).items()}
        assert counts == {pair: 8 if pair == ring_pair else 16 for pair in boundaries}
        assert {size for sizes in messages(report, kind).values() for size in sizes} == {2 * BIG_SEQ // 8 * 8192}
    assert max(report["construction"], report["peak"]) < 80e9 * 0.9
