"""Experts on fake CUDA: collectives and bytes of a step of 30 billion parameters; compiled blocks."""

from collections import Counter
from typing import Any

import pytest

from tests.fake.checks import clean, compiled
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, RECOMPUTE, Case
from tests.marks import with_more

# Qwen 3 30B-A3B
LAYERS, HIDDEN, HEADS, KV, HEAD_DIM, EXPERTS, WIDTH, TOP_K, VOCAB, SEQ = 48, 2048, 32, 4, 128, 128, 768, 8, 151936, 4096
TP, EP, DP = 2, 4, 4
QWEN: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_kv_heads": KV,
    "head_dim": HEAD_DIM, "padded_vocab_size": VOCAB, "seq_length": SEQ, "max_position_embeddings": SEQ,
    "moe_num_experts": EXPERTS, "moe_top_k": TOP_K, "moe_intermediate_size": WIDTH, "moe_router_type": "topk",
    "norm_topk_prob": True, "moe_aux_loss_coeff": 1e-3, "train_micro_batch_size_per_gpu": 1, **RECOMPUTE,
}  # fmt: skip
SHARED_OUT: dict[str, Any] = {"model_parallel_size": TP, "expert_parallel_size": EP, "sequence_parallel": True,
                              "zero_optimization": {"stage": 2}}  # fmt: skip
# Of one tensor rank: all experts, and of a block all other parameters; elements.
OF_EXPERTS = EXPERTS * 3 * WIDTH * HIDDEN // TP
OF_BLOCK = ((HEADS + 2 * KV) * HEAD_DIM * HIDDEN + HEADS * HEAD_DIM * HIDDEN) // TP + 2 * HIDDEN + EXPERTS * HIDDEN
OF_REST = 2 * VOCAB * HIDDEN // TP + HIDDEN
ROWS = SEQ * TOP_K // TP  # choices of a micro-batch that are of a tensor rank's experts


def derived(rank: int, layers: int) -> Counter[tuple[Any, ...]]:
    """Collectives of a step by (first rank, stride, ranks, kind, bytes), if experts are chosen alike."""
    group = (rank % TP, TP, EP, "all_to_all")  # all four data ranks share them out
    # Tokens to experts and back: forwards, recomputed, as gradients; their numbers before, forwards.
    return Counter({(*group, 2 * ROWS * HIDDEN): layers * (2 + 2 + 2), (*group, 8 * EXPERTS // TP): layers * 2})


def assert_step(seen: dict[str, Any], rank: int, layers: int) -> None:
    collectives = Counter(tuple(one) for one in seen["collectives"])
    between = {key: number for key, number in collectives.items() if key[3] == "all_to_all"}
    assert between == derived(rank, layers)
    # fp32 master weights and two moments: of this rank's experts whole, since it has no replica.
    experts, dense = layers * OF_EXPERTS // EP, layers * OF_BLOCK + OF_REST
    kept = 12 * (experts + dense // DP)
    assert seen["kept"] == pytest.approx(kept, rel=1e-3)
    # Backward begins with all weights in bf16 and ends with all gradients in fp32.
    least = max(2 * (experts + dense), 4 * (experts + dense // DP))
    block = OF_EXPERTS // EP + OF_BLOCK
    made = 10 * max(block, OF_REST) + 2 * ROWS * (6 * HIDDEN + 8 * WIDTH) + layers * 2 * SEQ * HIDDEN // TP
    assert kept + least <= seen["peak"] <= kept + least + made, (seen["peak"] - kept - least) / made


@pytest.mark.parametrize("rank", with_more([0, 3, 6], product=[0, 6]))
def test_shared_out_over_eight_gpus(rank: int, fake_cuda: FakeCuda) -> None:
    assert_step(clean(fake_cuda, Case(TP * DP, rank, {**QWEN, **SHARED_OUT, "num_layers": 3}, native=True)), rank, 3)


@pytest.mark.product
@pytest.mark.timeout(1200)
def test_30b_over_eight_gpus(fake_cuda: FakeCuda) -> None:
    """The whole model; other ranks see the same (by the layers of the test above)."""
    seen = clean(fake_cuda, Case(TP * DP, 5, {**QWEN, **SHARED_OUT}, native=True))
    assert_step(seen, 5, LAYERS)
    whole = LAYERS * (OF_EXPERTS + OF_BLOCK) + OF_REST
    assert 29e9 < TP * whole < 32e9
    assert max(seen["construction"], seen["peak"]) < 80e9 * 0.9


SMALL: dict[str, Any] = {"moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 64, "moe_router_type": "topk",
                         "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001,
                         "moe_shared_expert_intermediate_size": 128}  # fmt: skip
COMPILED: dict[str, Case] = {
    "one": Case(values={**SMALL, **COMPILE}),
    "tp2 sp": Case(2, 1, {**SMALL, **COMPILE, "model_parallel_size": 2, "sequence_parallel": True}),
    "capacity": Case(values={**SMALL, **COMPILE, "moe_expert_capacity_factor": 1.25}),
    "sinkhorn": Case(values={**COMPILE, "moe_num_experts": 8, "moe_intermediate_size": 64}),
    "ZeRO 3": Case(8, 3, {**SMALL, **COMPILE, "zero_optimization": {"stage": 3}}, native=True),
}


@pytest.mark.parametrize("name", with_more(COMPILED, product=COMPILED.keys() - {"tp2 sp"}))
def test_compiled_blocks_are_one_graph(name: str, fake_cuda: FakeCuda) -> None:
    seen = compiled(fake_cuda, COMPILED[name])
    assert seen["kernels"]["aten._grouped_mm"] >= 6 * 2, "experts do not run on torch's kernel"
