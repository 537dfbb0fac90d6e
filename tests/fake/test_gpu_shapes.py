"""The models whose speed `make gpu` measures, on fake CUDA: kernels of their step, and that 80 GB hold it."""

from typing import Any

import numpy as np
import pytest

from benchmarks.posttrain import MAX_LENGTH
from benchmarks.posttrain import SHAPES as PAIR_SHAPES
from benchmarks.train_throughput import keys_of, parse
from tests.fake.checks import clean
from tests.fake.client import FakeCuda
from tests.fake.layouts import DPO, Case

# Beside what the observer sees: fp32 gradients, master weights and both moments of Adam.
STATE_BYTES, MEMORY = 16, 80e9
SHORTER = 64  # of rows, so that a mask of seq x seq is told from a weight of hidden x hidden


def step_of(*argv: str) -> dict[str, Any]:
    """The keys of a contestant of `make gpu`."""
    keys = keys_of(parse(["--device", "cpu", "--precision", "bf16", "--compile", *argv]), 1)
    keys |= {"distributed_backend": "nccl", "seq_length": keys["seq_length"] - SHORTER}
    return keys


def starts(keys: dict[str, Any], mean: int) -> list[list[int]]:
    rows, seq = keys["train_micro_batch_size_per_gpu"], keys["seq_length"]
    begins = np.random.default_rng(0).random((rows, seq)) < 1 / mean
    begins[:, 0] = True
    return [np.flatnonzero(row).tolist() for row in begins]


def pairs_of_400m() -> dict[str, Any]:
    """A pair of the longest answers, a row each."""
    shape, seq = PAIR_SHAPES["400M"], MAX_LENGTH - SHORTER
    return {**DPO, "num_layers": shape["layers"], "hidden_size": shape["hidden"], "num_attention_heads": shape["heads"],
            "intermediate_size": shape["ffn"], "padded_vocab_size": shape["vocab"], "seq_length": seq,
            "max_position_embeddings": seq}  # fmt: skip


CUDNN_BACKWARD, PACKED = "aten._scaled_dot_product_cudnn_attention_backward", "torch_attn._varlen_attn_backward"
SHAPES: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "1.4B": (step_of("--shape", "1.4B"), None, CUDNN_BACKWARD),
    "1.4B packed": (step_of("--shape", "1.4B", "--documents", "512", "--only", "native"), 512, PACKED),
    "7B shape": (step_of("--shape", "7B-8layers", "--style", "llama"), None, CUDNN_BACKWARD),
    "DPO of 400M": (pairs_of_400m(), None, CUDNN_BACKWARD),
}


@pytest.mark.product
@pytest.mark.parametrize("name", SHAPES)
def test_the_step_fits(name: str, fake_cuda: FakeCuda) -> None:
    keys, mean, kernel = SHAPES[name]
    documents = [] if mean is None else [starts(keys, mean)]
    report = clean(fake_cuda, Case(values=keys, documents=documents, pairs="train_impl" in keys))
    assert report["kernels"][kernel] == keys["num_layers"]
    state = STATE_BYTES * report["parameters"] / 2
    assert report["passes"] + state < MEMORY, f"{(report['passes'] + state) / 1e9:.0f} GB"
    if mean is not None:
        count = sum(map(len, documents[0]))
        assert {call["documents"] < 2 * count for call in report["varlen"]} == {True}
