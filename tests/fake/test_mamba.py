"""Hybrids of Mamba on fake CUDA: no wait for the device, one graph a block, derived collectives and bytes."""

from collections import Counter
from typing import Any

import pytest

from tests.fake.checks import compiled
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, Case
from tests.marks import with_more

HIDDEN, HEADS, HEAD_DIM, STATE, GROUPS, SEQ, VOCAB = 512, 16, 64, 128, 2, 640, 384
HYBRID: dict[str, Any] = {
    "num_layers": 4, "attention_config": ["mamba2", "attention", "mamba", "mlp"], "hidden_size": HIDDEN,
    "mamba_num_groups": GROUPS, "mamba_head_dim": HEAD_DIM, "mamba_state_dim": STATE, "mamba_chunk_size": 128,
    "seq_length": SEQ, "max_position_embeddings": SEQ, "padded_vocab_size": VOCAB, "pos_emb": "none",
    "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip
CASES: dict[str, Case] = {
    "tp2": Case(2, 1, {**HYBRID, **COMPILE, "model_parallel_size": 2}),
    "packed": Case(values={**HYBRID, **COMPILE}, documents=[[[0, 300]], [[0, 17, 417]]]),
    "ZeRO 3": Case(8, 3, {**HYBRID, **COMPILE, "zero_optimization": {"stage": 3}}, native=True),
}
# Elements on one of two ranks.
INNER, RANK = HEADS * HEAD_DIM, HIDDEN // 16
SHARED = 2 * GROUPS * STATE
MAMBA2 = (HIDDEN * (2 * INNER + SHARED + HEADS) + 5 * (INNER + SHARED) + INNER * HIDDEN + INNER + HEADS) // 2
MAMBA = (HIDDEN * 2 * INNER + 5 * INNER + INNER * (RANK + 2 * STATE) + INNER * RANK + INNER + INNER * HIDDEN) // 2
OTHER_ELEMENTS = (4 * HIDDEN**2 + 3 * HIDDEN * 512 + 2 * VOCAB * HIDDEN) // 2 + 5 * HIDDEN
IN_FP32 = (2 * HEADS + INNER * STATE + INNER) // 2


def derived() -> Counter[tuple[Any, ...]]:
    """Collectives of a step of two tensor ranks, by (first rank, stride, ranks, kind, bytes)."""
    hidden, chosen = 2 * SEQ * HIDDEN, 2 * SEQ * (RANK + 2 * STATE)
    return Counter({
        # Each block's last linear forwards and its first backwards; the embedding, and the head backwards.
        (0, 1, 2, "all_reduce", hidden): 2 * 4 + 2,
        # Mamba's time steps, B and C, forwards and as gradients.
        (0, 1, 2, "all_reduce", chosen): 2,
        (0, 1, 2, "all_gather", 2 * 3 * 4 * SEQ): 1,  # cross-entropy
        (0, 1, 2, "all_reduce", 4): 2,  # whether all was finite, and the norm
    })  # fmt: skip


@pytest.mark.parametrize("name", with_more(CASES, product=["tp2", "packed", "ZeRO 3"]))  # half a minute each
def test_compiled_blocks_are_one_graph(name: str, fake_cuda: FakeCuda) -> None:
    report = compiled(fake_cuda, CASES[name])
    if name == "tp2":
        assert Counter(tuple(collective) for collective in report["collectives"]) == derived()
        assert report["parameters"] == 2 * (MAMBA2 + MAMBA + OTHER_ELEMENTS) + 4 * IN_FP32
