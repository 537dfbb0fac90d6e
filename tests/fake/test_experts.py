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
EXPERT_ELEMENTS = EXPERTS * 3 * WIDTH * HIDDEN // TP
BLOCK_ELEMENTS = (
    ((HEADS + 2 * KV) * HEAD_DIM * HIDDEN + HEADS * HEAD_DIM * HIDDEN) // TP + 2 * HIDDEN + EXPERTS * HIDDEN
)
OTHER_ELEMENTS = 2 * VOCAB * HIDDEN // TP + HIDDEN
ROWS = SEQ * TOP_K // TP  # choices of a micro-batch that are of a tensor rank's experts


def derived(rank: int, layers: int) -> Counter[tuple[Any, ...]]:
    """Collectives of a step by (first rank, stride, ranks, kind, bytes), if experts are chosen alike."""
    group = (rank % TP, TP, EP, "all_to_all")  # all four data ranks share them out
    # Tokens to experts and back: forwards, recomputed, as gradients; their numbers before, forwards.
    return Counter({(*group, 2 * ROWS * HIDDEN): layers * (2 + 2 + 2), (*group, 8 * EXPERTS // TP): layers * 2})


def assert_step(report: dict[str, Any], rank: int, layers: int) -> None:
    collectives = Counter(tuple(collective) for collective in report["collectives"])
    all_to_alls = {key: number for key, number in collectives.items() if key[3] == "all_to_all"}
    assert all_to_alls == derived(rank, layers)
    # fp32 master weights and two moments: of this rank's experts whole, since it has no replica.
    experts, dense = layers * EXPERT_ELEMENTS // EP, layers * BLOCK_ELEMENTS + OTHER_ELEMENTS
    retained_bytes = 12 * (experts + dense // DP)
    assert report["kept"] == pytest.approx(retained_bytes, rel=1e-3)
    # Backward begins with all weights in bf16 and ends with all gradients in fp32.
    min_extra = max(2 * (experts + dense), 4 * (experts + dense // DP))
    block = EXPERT_ELEMENTS // EP + BLOCK_ELEMENTS
    max_extra = 10 * max(block, OTHER_ELEMENTS) + 2 * ROWS * (6 * HIDDEN + 8 * WIDTH) + layers * 2 * SEQ * HIDDEN // TP
    assert retained_bytes + min_extra <= report["peak"] <= retained_bytes + min_extra + max_extra, (
        report["peak"] - retained_bytes - min_extra
    ) / max_extra


@pytest.mark.parametrize("rank", with_more([0, 3, 6], 3, product=[0, 6]))
def test_shared_out_over_eight_gpus(rank: int, fake_cuda: FakeCuda) -> None:
    assert_step(clean(fake_cuda, Case(TP * DP, rank, {**QWEN, **SHARED_OUT, "num_layers": 3}, native=True)), rank, 3)


@pytest.mark.product
@pytest.mark.timeout(1200)
def test_30b_over_eight_gpus(fake_cuda: FakeCuda) -> None:
    """The whole model; other ranks see the same (by the layers of the test above)."""
    report = clean(fake_cuda, Case(TP * DP, 5, {**QWEN, **SHARED_OUT}, native=True))
    assert_step(report, 5, LAYERS)
    full_elements = LAYERS * (EXPERT_ELEMENTS + BLOCK_ELEMENTS) + OTHER_ELEMENTS
    assert 29e9 < TP * full_elements < 32e9
    assert max(report["construction"], report["peak"]) < 80e9 * 0.9


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


@pytest.mark.parametrize("name", with_more(COMPILED, "tp2 sp", product=COMPILED.keys() - {"tp2 sp"}))
def test_compiled_blocks_are_one_graph(name: str, fake_cuda: FakeCuda) -> None:
    report = compiled(fake_cuda, COMPILED[name])
    assert report["kernels"]["aten._grouped_mm"] >= 6 * 2, "experts do not run on torch's kernel"


@pytest.mark.parametrize("name", with_more(["rowwise", "mxfp8"], "rowwise"))
def test_fp8_products_of_experts(name: str, fake_cuda: FakeCuda) -> None:
    """Two of four blocks have them, in one graph: three matrices, each with an output and two gradients."""
    keys = {**SMALL, **COMPILE, "num_layers": 4, "precision_fp8": name}
    report = compiled(fake_cuda, Case(values=keys, capability=(10, 0)), graphs=4)
    assert report["kernels"]["aten._scaled_grouped_mm"] == 2 * 3 * 3
    assert report["kernels"]["aten._grouped_mm"] == 2 * 3 * 3


@pytest.mark.more
def test_rounded_weights_of_experts_run_on_torch_s_kernel(fake_cuda: FakeCuda) -> None:
    report = compiled(fake_cuda, Case(values={**SMALL, **COMPILE, "qat": "nvfp4"}))
    assert report["kernels"]["aten._grouped_mm"] >= 6 * 2
