"""Layers of every kind beside the CPU, packed rows beside their documents alone, and bf16 beside fp32."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import grouped_mm, token_logprobs
from tests.gpu.runs import CPU, assert_gradients, loss_and_gradients, stage_on
from tests.model.runs import MODELS
from tests.model.stages import document_batch, documents, random_batch, small
from tests.model.test_mamba import MODELS as WITH_STATES

pytestmark = pytest.mark.gpu
PACKED: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 8, "num_kv_heads": 4, "padded_vocab_size": 512}


@pytest.mark.parametrize("rows", ["whole", "documents"])
@pytest.mark.parametrize("name", [*MODELS, *WITH_STATES])
def test_loss_and_gradients_are_those_of_the_cpu(name: str, rows: str, device: torch.device) -> None:
    args = small(**{**(MODELS | WITH_STATES)[name], "attention_backend": "auto"})
    batch = {"whole": random_batch, "documents": document_batch}[rows](args)
    on_cpu = loss_and_gradients(stage_on(args, CPU).train(), batch)
    on_device = loss_and_gradients(stage_on(args, device).train(), batch.to(device))
    torch.testing.assert_close(on_device[0], on_cpu[0], rtol=1e-4, atol=0)
    assert_gradients(on_device[1], on_cpu[1], 1e-4)


def separate_documents(batch: Batch) -> list[tuple[slice, Batch]]:
    """Each document of a packed batch in a row of its own, and its places among all of the batch."""
    seq, parts = batch.tokens.shape[1], []
    for row, begin, end in documents(batch):
        rows = [x[row : row + 1, begin:end] for x in (batch.tokens, batch.labels, batch.loss_weights, batch.positions)]
        parts.append((slice(row * seq + begin, row * seq + end), Batch(*rows)))
    return parts


@torch.no_grad()
def logprobs_of(stage: Any, batch: Batch) -> Tensor:
    """`[batch * seq]`, rows end to end."""
    values = stage(None, batch, partial(token_logprobs, labels=batch.labels.t(), group=None))
    return values.t().reshape(-1).cpu()


# fp32 sums in another order; bf16 rounds each activation to 2^-8 of itself, over two blocks.
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bfloat16", 2e-2)])
def test_packed_rows_equal_their_separate_documents(precision: str, bound: float, device: torch.device) -> None:
    """8 x 2048 with heads of 128; and unlike the same rows with documents that see each other."""
    rows, seq = (8, 2048) if device.type == "cuda" else (2, 128)
    args = small(**PACKED, precision=precision, seq_length=seq, max_position_embeddings=seq)
    packed, stage = document_batch(args, rows), stage_on(args, device).train()
    loss, summed = loss_and_gradients(stage, packed.to(device))
    logprobs, expected, total = logprobs_of(stage, packed.to(device)), torch.empty(rows * seq), torch.zeros(())
    gradients: dict[tuple[int, str], Tensor] = {}
    for places, document in separate_documents(packed):
        expected[places] = logprobs_of(stage, document.to(device))
        own_loss, document_gradients = loss_and_gradients(stage, document.to(device))
        total = total + own_loss
        gradients = {key: value + gradients.get(key, 0) for key, value in document_gradients.items()}
    torch.testing.assert_close(loss, total, rtol=bound, atol=0)
    assert (logprobs - expected).norm() <= bound * expected.norm()
    assert_gradients(summed, gradients, 2 * bound)
    mixed = replace(packed, documents=None)
    blind = (logprobs_of(stage, mixed.to(device)) - expected).norm() / expected.norm()
    assert blind > 2 * bound, "documents that see each other must show"


@pytest.mark.parametrize("name", ["neox", "llama", "gemma"])
def test_bf16_is_near_fp32(name: str, device: torch.device) -> None:
    args = small(**MODELS[name])
    batch = random_batch(args, rows=4)
    exact = logprobs_of(stage_on(args, CPU), batch)
    rounded = logprobs_of(stage_on(small(**MODELS[name], precision="bfloat16"), device), batch.to(device))
    # Logits of size one to ten, each rounded to 2^-8 of itself a few times over four blocks.
    assert (rounded - exact).abs().mean() < 0.1
    assert (rounded - exact).abs().mean() > 0, "it was not in bf16"


def test_products_by_group_are_those_of_the_cpu(device: torch.device) -> None:
    """torch's kernel in bf16, with empty groups and rows left over, beside plain products; gradients too."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(100, 64, generator=generator), torch.randn(4, 64, 32, generator=generator)
    ends = torch.tensor([30, 30, 97, 98], dtype=torch.int32)
    results = []
    for place in (CPU, device):
        leaves = [leaf.to(place, torch.bfloat16).requires_grad_() for leaf in (x, weights)]
        out = grouped_mm(*leaves, ends.to(place))[:98]
        out.float().square().sum().backward()
        results.append([out, leaves[0].grad[:98], leaves[1].grad])  # type: ignore[index]
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.float().cpu(), expected.float(), rtol=2e-2, atol=2e-1)  # type: ignore[union-attr]
