"""The delta rules in chunks, and over context ranks, beside the recurrence, and both beside transformers'
functions."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.data.batch import Documents
from megatron.data.context_parts import ContextLayout, part_of
from megatron.model.delta.context import scan_shared_rows
from megatron.model.delta.rule import chunk_delta_rule, recurrent_delta_rule, unit_length
from megatron.model.mamba import shared_row_inputs
from tests.pool import run_ranks

BATCH, KEY_HEADS, HEADS, KEY, VALUE = 2, 2, 6, 5, 7
NAMES = ("q", "k", "v", "log_decay", "rate", "initial")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Documents within chunks of 8, at their edges, and of one token; the second row has others.
STARTS = ({3, 4, 8, 16, 21}, {1, 15, 17})


DECAYS = pytest.mark.parametrize("per_dim", [False, True], ids=["gated delta net", "kimi"])


def inputs(seq: int, per_dim: bool = False) -> dict[str, Tensor]:
    """per_dim: a decay for each dimension of keys, whose heads are not shared."""
    key_heads = HEADS if per_dim else KEY_HEADS
    generator = torch.Generator().manual_seed(seq)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "q": unit_length(draw(seq, BATCH, key_heads, KEY)), "k": unit_length(draw(seq, BATCH, key_heads, KEY)),
        "v": draw(seq, BATCH, HEADS, VALUE), "log_decay": -draw(seq, BATCH, HEADS, *[KEY] * per_dim).exp(),
        "rate": draw(seq, BATCH, HEADS).sigmoid(), "initial": draw(BATCH, HEADS, KEY, VALUE),
    }  # fmt: skip
    return {name: value.requires_grad_() for name, value in tensors.items()}


def documents(seq: int) -> Tensor:
    return torch.stack([torch.tensor([t in starts for t in range(seq)]).cumsum(0) for starts in STARTS], 1) + 1


@pytest.mark.parametrize("seq", [1, 7, 8, 29])
@pytest.mark.parametrize("packed", [False, True], ids=["one text", "documents"])
@DECAYS
def test_chunks_equal_the_recurrence(seq: int, packed: bool, per_dim: bool) -> None:
    numbers, chunk = documents(seq) if packed else None, 20 if per_dim else 8  # 20: rows of pairs come in eights
    results = []
    for rule in (recurrent_delta_rule, lambda *args: chunk_delta_rule(*args[:5], chunk, *args[5:])):
        values = inputs(seq, per_dim)
        y, state = rule(*(values[name] for name in NAMES[:5]), numbers, values["initial"])
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        ((y * weights).sum() + state.square().sum()).backward()
        results.append({"y": y, "state": state, **{name: values[name].grad for name in NAMES}})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        assert value is not None and value.abs().max() > 0.01 or seq == 1


@DECAYS
def test_a_document_does_not_depend_on_those_before(per_dim: bool) -> None:
    values, numbers = inputs(29, per_dim), documents(29)
    args = [values[name] for name in NAMES[:5]]
    packed, _ = chunk_delta_rule(*args, 8, numbers)
    single, _ = chunk_delta_rule(*(x[17:, 1:] for x in args), 8)
    torch.testing.assert_close(packed[17:, 1:], single, **CLOSE)
    assert not torch.allclose(chunk_delta_rule(*args, 8)[0][17:, 1:], single, **CLOSE)


@pytest.mark.parametrize("seq", [5, 29])
@DECAYS
def test_transformers_functions_give_the_same(seq: int, per_dim: bool) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    references = [qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule]
    if per_dim:
        references = [kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention]
    values = inputs(seq, per_dim)
    q, k, v, log_decay, rate, initial = (values[name].detach() for name in NAMES)
    rows = [x.transpose(0, 1) for x in (q, k, v, log_decay, rate)]
    y, state = chunk_delta_rule(q * KEY**-0.5, k, v, log_decay, rate, 8, initial=initial)
    for reference in references:
        expected, last = reference(*rows, initial_state=initial, output_final_state=True)
        torch.testing.assert_close(y, expected.transpose(0, 1), **CLOSE)
        torch.testing.assert_close(state, last, **CLOSE)


def scan_and_gradients(rank: int, world_size: int, per_dim: bool) -> dict[str, Tensor]:
    """For the pool: what a rank's columns of rows of 32 tokens read, zeros elsewhere, and gradients."""
    values, numbers, columns = inputs(32, per_dim), documents(32), torch.arange(32)
    if world_size == 1:
        y, _ = recurrent_delta_rule(*(values[name] for name in NAMES[:5]), numbers)
    else:
        starts = sorted({32 * row + start for row in range(BATCH) for start in (0, *STARTS[row])})
        tokens = torch.zeros(BATCH, 32, dtype=torch.int64)
        batch = Batch(tokens, tokens, tokens, documents=Documents(torch.tensor([*starts, 64], dtype=torch.int32)))
        batch = part_of(batch, ContextLayout(world_size, keeps_documents=False), rank)
        chunks = shared_row_inputs(batch, world_size, rank, tail=0).chunks
        assert batch.context is not None and chunks is not None
        columns, rule = batch.context.columns, partial(chunk_delta_rule, chunk=3)
        local = [values[name][columns] for name in NAMES[:5]]
        y = scan_shared_rows(rule, *local, chunks, torch.distributed.group.WORLD)
    full = torch.zeros(32, *y.shape[1:]).index_put((columns,), y)
    (full * torch.randn(full.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return {"y": full.detach(), **{name: values[name].grad for name in NAMES[:5]}}


@pytest.mark.parametrize("ranks", [2, 4])
@DECAYS
def test_context_ranks_equal_the_recurrence(ranks: int, per_dim: bool) -> None:
    """On chunks of 8 and 4 tokens, some of which a document crosses whole."""
    [expected] = run_ranks(scan_and_gradients, 1, per_dim)
    parts = run_ranks(scan_and_gradients, ranks, per_dim)
    for name, value in expected.items():
        total = torch.stack([part[name] for part in parts]).sum(0)
        torch.testing.assert_close(total, value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
