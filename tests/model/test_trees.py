"""Trees: texts that share a beginning, which stands in a row once, are as if alone; and FlexAttention."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.attention.flex_attention as flex_attention
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from megatron.data import Batch
from megatron.data.preferences.responses import with_responses
from megatron.methods.preferences.objective import dpo
from megatron.methods.preferences.pair_losses import PairSettings
from megatron.model.attention import AttentionBackends, AttentionOptions, tree_inputs
from megatron.model.attention.flex import Flex
from megatron.model.attention.masks import BLOCK, block_mask, document_ids, prefix_ids, tree_attention_mask
from megatron.model.build_specs import attention_spec
from tests.fake.layouts import PACKED_DPO
from tests.model.runs import MODELS as TABLE
from tests.model.stages import chosen, document_batch, gradients, inputs_of, make_stage, random_batch, small
from tests.model.test_attention import exact_attention
from tests.objectives.cases import PAIRS, documents_of, in_rows, shared_in_rows
from tests.objectives.steps import step_loss

# Two answers to a prompt, a document by itself, and one that another continues.
BRANCHES = torch.tensor([0] * 4 + [1] * 3 + [2] * 4 + [3] * 3 + [5, 5], dtype=torch.int32)
CONTEXTS = torch.tensor([0] * 11 + [3] * 3 + [3, 3], dtype=torch.int32)
POSITIONS = torch.tensor([*range(7), *range(4, 8), *range(5)])
TEXTS = [[*range(7)], [*range(4), *range(7, 11)], [*range(11, 16)]]  # the places of each
NUM_OWN = [3, 4, 5]  # tokens at the end of each that it alone has, or the first that have them
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary", "rotary_pct": 0.5}, "window": {"pos_emb": "rotary", "sliding_window_width": 4},
    "alibi": {"pos_emb": "alibi"}, "rpe": {"pos_emb": "rpe"}, "learned": {"pos_emb": "learned"},
    "math": {"pos_emb": "rotary", "attention_backend": "math"},
}  # fmt: skip
LOSSES = ({"sigmoid": 0.5, "sft": 0.3, "aot": 0.2}, {"orpo": 1.0}, {"simpo": 1.0})


def pairs(shared: bool) -> Batch:
    documents, make = documents_of(PAIRS), shared_in_rows if shared else in_rows
    return make(documents, [[4, 5, 0, 1], [6, 7, 2, 3]], 36 if shared else 48, [1.0] * len(documents) + [0.0] * 2)


def step(model: dict[str, Any], batch: Batch, losses: dict[str, float]) -> tuple[Tensor, dict, dict]:
    args = small(**model, seq_length=batch.tokens.shape[1], max_position_embeddings=64)
    stage = make_stage(args)
    references = torch.tensor([-20.0 - number for number in range(8)] + [0.0, 0.0])
    batch = with_responses(batch, reference_logprobs=references)
    loss, metrics = step_loss(dpo(losses, PairSettings(0.3)), lambda part: stage(None, part), [batch])
    loss.backward()
    return loss.detach(), metrics, gradients(stage)


@pytest.mark.parametrize("losses", LOSSES, ids=lambda losses: next(iter(losses)))
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_of_prompts_that_stand_twice(model: str, losses: dict[str, float]) -> None:
    loss, metrics, grads = step(MODELS[model], pairs(True), losses)
    expected, expected_metrics, expected_grads = step(MODELS[model], pairs(False), losses)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    actual_metrics, reference_metrics = (
        {key: float(value) for key, value in values.items()} for values in (metrics, expected_metrics)
    )
    assert actual_metrics == pytest.approx(reference_metrics, rel=1e-5, abs=1e-5)
    for key, grad in expected_grads.items():
        tolerance = 1e-5 * float(grad.abs().max()) + 1e-7
        torch.testing.assert_close(grads[key], grad, rtol=1e-4, atol=tolerance, msg=str(key))


@contextmanager
def flex_runs_on_a_cpu() -> Iterator[None]:
    """Let FlexAttention run unfused, with gradients, which only its kernel has none of on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flex, "needs_gpu", False)
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        patch.setattr(flex_attention, "_warn_once", lambda *words, **kwargs: None)
        yield


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("form", [None, "blocks"])
@flex_runs_on_a_cpu()
def test_a_text_does_not_depend_on_its_batch(form: str | None, window: int | None, kv_heads: int) -> None:
    """Outputs and gradients beside the formula over each text; numbers are in no order in the second row."""
    spec = attention_spec(small(sliding_window_width=window, num_kv_heads=kv_heads), 0)
    branch_ids, context_ids = (torch.stack([ids, 5 - ids]) for ids in (BRANCHES, CONTEXTS))
    inputs = tree_inputs(spec, POSITIONS.repeat(2, 1), branch_ids, context_ids, 16, form, lambda *_: None)
    assert (inputs.blocks is None, inputs.mask is None) == (form is None, form is not None)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(16, 2, heads, 8, generator=generator).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    factors = torch.randn(16, 2, 4, 8, generator=generator)
    backends = chosen(small()) if form is None else AttentionBackends({"with shared prompts": Flex("flex")})
    out = backends.attend(*leaves, inputs, AttentionOptions())
    actual = torch.autograd.grad((out * factors).sum(), leaves)
    expected, total = torch.zeros(16, 2, 4, 8, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for places, num_own in zip(TEXTS, NUM_OWN, strict=True):
        steps = torch.arange(len(places))
        hidden = (steps > steps[:, None]) | (steps[:, None] - steps > (len(places) if window is None else window))
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        text_out = exact_attention(*(leaf[places] for leaf in leaves), bias)
        begin = 0 if places[0] not in TEXTS[0] or places is TEXTS[0] else len(places) - num_own
        expected[places[begin:]] = text_out[begin:].detach()
        total = total + (text_out[begin:] * factors[places[begin:]]).sum()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual, torch.autograd.grad(total, leaves), rtol=1e-5, atol=1e-5)


@flex_runs_on_a_cpu()
def test_pairs_that_share_prompts_run_on_flex_attention() -> None:
    flex = {**MODELS["window"], **PACKED_DPO, "attention_backend": "flex"}
    args = small(**flex, seq_length=36, max_position_embeddings=64)
    batch, stage = pairs(True), make_stage(args)
    assert batch.positions is not None and inputs_of(stage, batch, batch.positions).blocks is not None
    actual, expected = (step(model, pairs(True), {"sigmoid": 1.0}) for model in (flex, MODELS["window"]))
    torch.testing.assert_close(actual[::2], expected[::2], rtol=1e-4, atol=1e-5)


CAPPED = {"num_kv_heads": 2, "attn_logit_softcapping": 0.5}
SINKS = {**TABLE["sinks"], "attn_logit_softcapping": 2.0}


# Each pair of windows, packed rows, and caps or sinks once.
@pytest.mark.parametrize(("keys", "packed"), [
    ({"num_kv_heads": 2}, False), (CAPPED, True), ({"num_kv_heads": 2, "sliding_window_width": 5}, True),
    ({**CAPPED, "sliding_window_width": 5}, False), (SINKS, True), (SINKS, False),
])  # fmt: skip
@flex_runs_on_a_cpu()
def test_flex_attention_equals_the_plain_formula(keys: dict[str, Any], packed: bool) -> None:
    outcomes = []
    for name in ("flex", "math"):
        args = small(**keys, attention_backend=name)
        stage, batch = make_stage(args), (document_batch if packed else random_batch)(args)
        positions = torch.arange(16).expand(2, 16) if batch.positions is None else batch.positions
        assert (inputs_of(stage, batch, positions).blocks is not None) == (name == "flex")
        logits = stage(None, batch)
        logits.square().sum().backward()
        outcomes.append((logits.detach(), gradients(stage)))
    rtol, atol = (1e-4, 1e-3) if "attention_sinks" in keys else (1e-5, 2e-4)
    torch.testing.assert_close(*outcomes, rtol=rtol, atol=atol)


@flex_runs_on_a_cpu()
def test_flex_attention_is_in_the_graph_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of blocks that are not compiled; other documents compile nothing anew."""
    compile_eagerly = partialmethod(nn.Module.compile, backend="aot_eager")  # no kernel of it has gradients on a CPU
    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    monkeypatch.setattr("megatron.training.compile_blocks.has_compiler", lambda device: True)
    outcomes = []
    for compiled in (False, "block"):
        args = small(num_kv_heads=2, attention_backend="flex", compile=compiled)
        stage = make_stage(args).train()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for seed in (0, 1, 2):
            stage.zero_grad()
            logits = stage(None, document_batch(args, seed=seed))
            logits.square().sum().backward()
            outcomes.append((logits.detach(), gradients(stage)))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    torch.testing.assert_close(outcomes[:3], outcomes[3:], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seq", [BLOCK - 3, 4 * BLOCK, 5 * BLOCK + 9])
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("kind", ["causal", "documents", "trees"])
def test_blocks_are_those_of_torch(kind: str, window: int | None, seq: int) -> None:
    """`create_block_mask` looks at every place; ours may hold a few more where numbers are in no order."""
    generator, rows = torch.Generator().manual_seed(0), 1 if kind == "causal" else 2
    ids = (torch.rand(rows, seq, generator=generator) < 4 / seq).cumsum(1, dtype=torch.int32)
    branch = None if kind == "causal" else ids
    context = None if kind != "trees" else (branch - branch % 3).to(torch.int32)  # type: ignore[operator]
    mask = block_mask(seq, torch.device("cpu"), window, None, branch, context)
    dense = create_mask(mask.mask_mod, rows, 1, seq, seq, device="cpu")
    steps = torch.arange(seq)
    expected = (steps <= steps[:, None]).expand(rows, 1, seq, seq)
    if branch is not None:
        expected = expected & tree_attention_mask(branch, branch if context is None else context)
    if window is not None:
        expected = expected & (steps[:, None] - steps <= window)
    assert torch.equal(dense, expected)
    torch_mask = create_block_mask(mask.mask_mod, rows, 1, seq, seq, device="cpu")
    partial, full = lists_of(mask)
    torch_partial, torch_full = (lists.expand_as(partial) for lists in lists_of(torch_mask))
    assert not (partial & full).any() and not (full & ~torch_full).any()
    blocks, torch_listed = partial | full, torch_partial | torch_full
    assert not (torch_listed & ~blocks).any(), "a block that shows a place is left out"
    if kind != "trees":
        assert torch.equal(blocks, torch_listed) and torch.equal(full, torch_full)
    assert (blocks & ~torch_listed).sum() <= 0.2 * blocks.sum()


def lists_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The blocks that a function looks into, and those that are seen whole."""
    return blocks_of(mask.kv_num_blocks, mask.kv_indices), blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices)


def blocks_of(numbers: Tensor | None, indices: Tensor | None) -> Tensor:
    """Boolean `[rows, 1, blocks, blocks]`."""
    is_block = torch.arange(indices.shape[-1]) < numbers.unsqueeze(-1)
    return torch.zeros_like(is_block).scatter_(-1, indices.long(), is_block)


def test_documents_are_numbered() -> None:
    starts = torch.tensor([0, 2, 5, 6, 8, 8], dtype=torch.int32)
    assert document_ids(starts, 2, 4).tolist() == [[1, 1, 2, 2], [2, 3, 4, 4]]
    assert document_ids(starts, 2, 4).dtype == torch.int32


def test_what_a_document_lends_is_the_context_of_both() -> None:
    starts = torch.tensor([0, 5, 8, 10, 16, 16], dtype=torch.int32)  # the second continues 2 tokens of the first
    written_out = torch.tensor([0, 5, 10, 12, 18, 18], dtype=torch.int32)
    branch, context = prefix_ids(starts, written_out, 2, 8)
    mask = tree_attention_mask(branch, context)[0, 0]
    attended = [row.nonzero().flatten().tolist() for row in mask[4:8]]
    assert attended == [[0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 5, 6], [0, 1, 5, 6, 7]]
    assert branch.dtype == context.dtype == torch.int32
    without_context = tree_attention_mask(*prefix_ids(starts, starts, 2, 8))
    assert torch.equal(without_context, tree_attention_mask(*(document_ids(starts, 2, 8),) * 2))
