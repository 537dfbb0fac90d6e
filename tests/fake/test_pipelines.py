"""Pipelines of the native engine on fake CUDA: no wait, and every rank receives what its neighbours send."""

import math
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


def messages(report: dict[str, Any], kind: str) -> dict[tuple[int, int], list[int]]:
    """Bytes of the sends or receives of a step, in order, by the pair of ranks."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for lower_rank, stride, _, name, size in report["collectives"]:
        if name == kind:
            sizes.setdefault((lower_rank, lower_rank + stride), []).append(size)
    return sizes


@pytest.mark.parametrize("name", with_more(LAYOUTS, *[name for name in LAYOUTS if name != "ZeRO 3"]))
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
