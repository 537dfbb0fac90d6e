"""Context parallelism on fake CUDA: kernels, collectives and their order, bytes."""

from functools import partial
from typing import Any

import pytest

from tests.fake.checks import clean
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, GQA, LAYERS, PACKED, SEQ, SP2, WINDOW, Case
from tests.fake.test_pipelines import HYBRID_120B, LLAMA_70B
from tests.marks import with_more

TWO_DOCUMENTS = [[[0, 100], [0]]]
TYPES: dict[str, dict[str, Any]] = {
    name: {"context_parallel_size": 2, "context_parallel_type": name} for name in ("allgather", "ring", "ulysses")
}
KERNELS = {
    "allgather": "torch_attn._varlen_attn_backward", "ring": "aten._flash_attention_backward",
    "ulysses": "aten._scaled_dot_product_cudnn_attention_backward",
}  # fmt: skip
LOOKS: dict[str, dict[str, Any]] = {"rows": GQA, "documents": PACKED, "sequence parallel": SP2}
LONG = 131072


def assert_all_clean(fake_cuda: FakeCuda, cases: list[Case]) -> list[dict[str, Any]]:
    return [clean(fake_cuda, case) for case in cases]


def assert_one_order(fake_cuda: FakeCuda, cases: list[Case], axis: int) -> list[dict[str, Any]]:
    """Every rank is clean; ranks of a group run the same collectives in it. axis: ranks between its
    members."""
    reports = assert_all_clean(fake_cuda, cases)
    collectives_by_group: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
    for case, report in zip(cases, reports, strict=True):
        collectives = [tuple(collective) for collective in report["collectives"]]
        collectives = [c for c in collectives if c[3] not in ("send", "receive")]
        assert any(c[1] == axis and c[2] > 1 for c in collectives), "ranks of the axis exchange nothing"
        for group in {collective[:3] for collective in collectives}:
            group_collectives = [collective for collective in collectives if collective[:3] == group]
            expected = collectives_by_group.setdefault(group, group_collectives)
            assert expected == group_collectives, f"rank {case.rank} in group {group}"
    return reports


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("look", with_more(LOOKS, "documents", product=["sequence parallel"]))
def test_kernels_and_order(name: str, look: str, fake_cuda: FakeCuda) -> None:
    values = LOOKS[look]
    keys = {**TYPES[name], **values}
    tensor = values.get("model_parallel_size", 1)
    documents = TWO_DOCUMENTS if "reset_attention_mask" in values else []
    cases = [Case(2 * tensor, rank, keys, documents=documents) for rank in range(0, 2 * tensor, tensor)]
    check = assert_all_clean if name == "ring" else partial(assert_one_order, axis=tensor)
    reports = check(fake_cuda, cases)
    kernel = KERNELS[name] if name != "ulysses" or not documents else "torch_attn._varlen_attn_backward"
    # In a ring each rank computes both blocks of keys. Keys are gathered in up to four parts of their heads.
    calls = {"ring": 2, "allgather": values.get("num_kv_heads", 4), "ulysses": 1}[name]
    assert all(report["kernels"][kernel] == LAYERS * calls for report in reports)


def test_windows_need_no_mask(fake_cuda: FakeCuda) -> None:
    for name in ("allgather", "ring"):  # where layers with windows gather keys
        report = clean(fake_cuda, Case(2, 1, {**TYPES[name], **WINDOW, **PACKED}, documents=TWO_DOCUMENTS))
        assert report["kernels"]["torch_attn._varlen_attn_backward"] == LAYERS * 4


@pytest.mark.more
@pytest.mark.parametrize("name", ["allgather", "ulysses"])
def test_blocks_compile_as_one_graph(name: str, fake_cuda: FakeCuda) -> None:
    report = clean(fake_cuda, Case(2, 1, {**TYPES[name], **COMPILE}))
    assert report["compiled"]["breaks"] == 0 and report["compiled again"] == report["compiled"]


@pytest.mark.parametrize("name", with_more(TYPES, product=["ring", "allgather"]))
def test_activations_fall_with_the_number_of_ranks(name: str, fake_cuda: FakeCuda) -> None:
    """Weights and gradients are left out."""
    held = []
    for size in (1, 2, 4):
        keys = {"num_layers": 6, "context_parallel_size": size, "seq_length": 8 * SEQ}
        keys |= {"context_parallel_type": name, "max_position_embeddings": 8 * SEQ, "num_kv_heads": 4}
        report = clean(fake_cuda, Case(size, size - 1, keys))
        held.append(report["passes"] - 2 * report["parameters"])
    print(f"{name}: bytes held beside weights and gradients, on 1, 2 and 4 ranks: {held}")
    assert held[1] < 0.56 * held[0] and held[2] < 0.56 * held[1]


@pytest.mark.product
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["allgather", "ulysses"])
def test_a_70b_at_131072_tokens(name: str, fake_cuda: FakeCuda) -> None:
    """tp8 cp8 pp4: ranks of three stages, and a context neighbour of one of them."""
    values = {**LLAMA_70B, "pipe_parallel_size": 4, "pipeline_schedule": "1f1b", "gradient_accumulation_steps": 4,
              "seq_length": LONG, "max_position_embeddings": LONG, "context_parallel_size": 8,
              "context_parallel_type": name, "zero_optimization": {"stage": 1}}  # fmt: skip
    if name == "ulysses":  # of eight heads on each tensor rank, one of keys
        values |= {"num_kv_heads": 8}
    cases = [Case(256, rank, values, native=True) for rank in (8, 16, 64 + 8, 3 * 64 + 8)]
    reports = assert_one_order(fake_cuda, cases, 8)
    for report in reports:
        print(f"70B, {name}: {report['peak'] / 2**30:.1f} GiB at most in a step")
        assert max(report["construction"], report["peak"]) < 80e9 * 0.9


@pytest.mark.product
@pytest.mark.timeout(1200)
def test_a_hybrid_of_120b_on_four_context_ranks(fake_cuda: FakeCuda) -> None:
    """tp1 cp4 ep4 pp22, as its users train: experts are spread over context ranks."""
    values = {**HYBRID_120B, "context_parallel_size": 4, "context_parallel_type": "allgather",
              "gradient_accumulation_steps": 2, "seq_length": 32768, "max_position_embeddings": 32768}  # fmt: skip
    cases = [Case(88, rank, values, native=True) for rank in (40, 41, 43)]
    for report in assert_one_order(fake_cuda, cases, 1):
        assert max(report["construction"], report["peak"]) < 80e9 * 0.9
