"""NEFTune: as transformers' hook, by document, in training alone, and the same in any layout."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.neftune import neftune_post_forward_hook

from megatron.data import Batch
from megatron.data.batch import Documents
from megatron.model import Stage
from megatron.model.embedding import add_noise, document_lengths
from megatron.mpu import fork_seed, mix_seed
from tests.model.runs import LLAMA, NEOX, assert_steps, sgd_steps
from tests.model.stages import make_stage, random_batch, small
from tests.pool import run_ranks

ALPHA = 7.0
NOISE = {"neftune_noise_alpha": ALPHA}
LAYOUTS: list[dict[str, Any]] = [{"model_parallel_size": 2}, {"model_parallel_size": 2, "sequence_parallel": True},
                                 {"pipe_parallel_size": 2},
                                 {"checkpoint_activations": True, "model_parallel_size": 2}]  # fmt: skip
SEED = 11


def noise_of(stage: Stage, batch: Batch) -> Tensor:
    """`[batch, seq, hidden]` that training adds to the embeddings."""
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    embedding = stage.layers["0"]
    with torch.no_grad():
        embedded = embedding.eval()(batch.tokens, positions, SEED, batch.documents and batch.documents.cu_seqlens)
        return (
            embedding.train()(batch.tokens, positions, SEED, batch.documents and batch.documents.cu_seqlens) - embedded
        ).transpose(0, 1)


def noisy(**keys: Any) -> Stage:
    args = small(**NOISE, **keys)
    return make_stage(args)


@pytest.mark.parametrize("model", [{}, {"embedding_multiplier": 3.0}, {"pos_emb": "learned"}], ids=str)
def test_is_what_transformers_adds(model: dict[str, Any]) -> None:
    """To the embedding as it comes out of Gemma's, multiplied."""
    stage = noisy(**model)
    batch = random_batch(small(), rows=1)
    module = torch.nn.Embedding(4, 4)
    module.neftune_noise_alpha = ALPHA
    with fork_seed(mix_seed(SEED, "neftune"), torch.device("cpu")):
        expected = neftune_post_forward_hook(module, (), torch.zeros(1, 16, small().hidden_size))
    torch.testing.assert_close(noise_of(stage, batch), expected, rtol=1e-5, atol=1e-5)


def test_depends_on_the_document_not_on_the_row() -> None:
    """The paper's L, the length of a text, in rows of several texts as in rows that are padded."""
    stage = noisy(seq_length=1024, max_position_embeddings=1024)
    documents = (768, 192, 64)
    begins = (0, documents[0], documents[0] + documents[1])
    packed = torch.tensor([row * 1024 + begin for row in range(3) for begin in begins] + [3 * 1024], dtype=torch.int32)
    padded = torch.tensor([0, 768, 1024, 1024 + 192, 2048, 2048 + 64, 3072], dtype=torch.int32)
    tokens = torch.zeros(3, 1024, dtype=torch.int64)
    noise = [noise_of(stage, Batch(tokens, tokens, tokens, documents=Documents(starts))) for starts in (packed, padded)]
    for row, (begin, length) in enumerate(zip(begins, documents, strict=True)):
        bound = ALPHA / math.sqrt(length * small().hidden_size)
        for document_noise in (noise[0][:, begin : begin + length].flatten(), noise[1][row, :length].flatten()):
            assert 0.98 * bound < document_noise.abs().max() <= 1.0001 * bound
            assert document_noise.var() == pytest.approx(bound**2 / 3, rel=0.1)
            assert document_noise.mean().abs() < 5 * bound / math.sqrt(3 * len(document_noise))
    assert noise[0].unique().numel() > 0.98 * noise[0].numel(), "every place has noise of its own"


def test_parts_of_the_sequence_are_of_the_whole() -> None:
    x, lengths = torch.zeros(8, 2, 4), document_lengths(torch.zeros(2, 8), None)
    full = add_noise(x, lengths, ALPHA, SEED)
    parts = [add_noise(x[:2], lengths, ALPHA, SEED, part, 4) for part in range(4)]
    assert torch.equal(torch.cat(parts), full)
    assert not torch.equal(add_noise(x, lengths, ALPHA, SEED + 1), full)
    assert add_noise(x.bfloat16(), lengths, ALPHA, SEED).dtype == torch.bfloat16


@pytest.mark.parametrize("model", [NEOX, LLAMA], ids=["neox", "llama"])
def test_a_step_is_the_same_in_any_layout(model: dict[str, Any]) -> None:
    values, zero_alpha = {**model, **NOISE}, {**model, "neftune_noise_alpha": 0.0}
    noisy_step, zero_alpha_step, unset = run_ranks(sgd_steps, 1, [values, zero_alpha, model])[0]
    assert abs(noisy_step.loss - zero_alpha_step.loss) > 1e-4, "the noise does nothing"
    assert torch.equal(zero_alpha_step.loss, unset.loss), "alpha 0 is none"
    for actual, reference in zip(noisy_step.logprobs, zero_alpha_step.logprobs, strict=True):
        assert torch.equal(actual, reference), "noise in evaluation"
    assert_steps([({**values, **layout}, noisy_step) for layout in LAYOUTS], 2)
