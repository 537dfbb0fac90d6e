"""Attention kernels of the device beside the plain formula, and the choice among them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from megatron.data import Batch
from megatron.data.batch import Documents
from megatron.data.context_parts import ContextLayout, part_of
from megatron.model.attention import AttentionInputs, AttentionOptions, document_mask, ring, tree_inputs, window_mask
from megatron.model.attention.inputs import KeyRuns
from megatron.model.attention.masks import block_mask
from megatron.model.attention.ring import RingBlock
from megatron.model.build_specs import attention_spec
from megatron.mpu import DTYPES, token_logprobs
from megatron.neox_arguments import ConfigError
from tests.gpu.runs import WIDE, assert_gradients, loss_and_gradients, stage_on
from tests.model.stages import chosen, document_batch, inputs_of, random_batch, small

pytestmark = pytest.mark.gpu
# bf16 holds 8 bits, 2^-8 = 0.004 of a value; probabilities, outputs and gradients are each rounded once or
# twice.
BOUND = 2e-2
PROMPT = 70  # tokens before two answers, in the middle of blocks of 128; a document follows


@pytest.fixture
def own_flash() -> Iterator[None]:
    yield
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def qkv(device: torch.device, heads: int, kv_heads: int, seq: int = 128) -> list[Tensor]:
    """`[seq, batch, heads, head_dim]` of bf16 values, as fp32 leaves."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(seq, 2, n, 64, generator=generator) for n in (heads, kv_heads, kv_heads)]
    return [value.bfloat16().float().to(device).requires_grad_() for value in values]


def assert_near(actual: list[Tensor], expected: list[Tensor]) -> None:
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (actual_tensor - expected_tensor).norm() <= BOUND * expected_tensor.norm()


def outcome(name: str, inputs: AttentionInputs, leaves: list[Tensor], dtype: torch.dtype, **run: Any) -> list[Tensor]:
    """Output and gradients, fp32."""
    precision = {torch.float32: "fp32", torch.bfloat16: "bfloat16"}[dtype]
    device = leaves[0].device.type
    backend = chosen(small(**{**WIDE, **run}, attention_backend=name, precision=precision), device)
    out = backend.attend(*(leaf.to(dtype) for leaf in leaves), inputs, AttentionOptions())
    return [out.detach().float(), *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["auto", "cudnn", "flash", "efficient", "flex", "flash3", "flash4"])
def test_kernel_equals_math(name: str, kv_heads: int, device: torch.device, own_flash: None) -> None:
    leaves, run = qkv(device, 4, kv_heads, 128), {"num_kv_heads": kv_heads, "seq_length": 128}
    expected = outcome("math", AttentionInputs(), leaves, torch.float32, **run)
    inputs = AttentionInputs(blocks=block_mask(128, device)) if name == "flex" else AttentionInputs()
    try:
        actual = outcome(name, inputs, leaves, torch.bfloat16, **run)
    except ConfigError as problem:
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        absent = "not installed" in str(problem)
        assert not hopper or kv_heads == 2 or absent, "whole heads run on each of them there"
        assert device.type == "cpu" or name != "auto", "there is always one"
        pytest.skip(str(problem))
    assert_near(actual, expected)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])  # flash's kernel and the memory-efficient one
def test_documents_equal_their_mask(precision: str, device: torch.device) -> None:
    leaves, seq = qkv(device, 4, 2), 128
    starts = torch.tensor([0, 17, 64, 100, seq, seq + 1, 2 * seq, 2 * seq], dtype=torch.int32)
    run = {"num_kv_heads": 2}
    masked = AttentionInputs(mask=document_mask(starts, 2, seq).to(device))
    expected = outcome("math", masked, leaves, torch.float32, **run)
    inputs = AttentionInputs(cu_seqlens=starts.to(device), longest=torch.empty(127, 0))
    actual = outcome("auto", inputs, leaves, DTYPES[precision], **run)
    assert_near(actual, expected)


@pytest.mark.only_gpu("CPUs have no kernel for windows, but a mask")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [1, 20])
def test_windows_through_varlen_equal_their_mask(width: int, precision: str, device: torch.device) -> None:
    leaves, seq, run = qkv(device, 4, 2), 128, {"num_kv_heads": 2, "sliding_window_width": width}
    mask = window_mask(seq, width, device)
    expected = outcome("math", AttentionInputs(mask=mask), leaves, torch.float32, **run)
    starts = torch.tensor([0, seq, 2 * seq], dtype=torch.int32, device=device)
    inputs = AttentionInputs(cu_seqlens=starts, longest=torch.empty(seq, 0), window=width)
    actual = outcome("auto", inputs, leaves, DTYPES[precision], **run)
    assert_near(actual, expected)


@pytest.mark.only_gpu("FlexAttention has no gradients on CPUs")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kind", ["rows", "documents", "shared prompts"])
def test_flex_attention_equals_its_mask(kind: str, window: int | None, device: torch.device) -> None:
    """Rows that are no whole number of blocks; other values of the same shape compile nothing anew."""
    seq, graphs = 300, []
    spec = attention_spec(small(**{**WIDE, "sliding_window_width": window}), 0)
    run = {"num_kv_heads": 2, "sliding_window_width": window, "seq_length": seq, "max_position_embeddings": seq}
    leaves, place = qkv(device, 4, 2, seq), torch.arange(seq, device=device)
    for answer in (60, 90):
        ends = torch.tensor([PROMPT, PROMPT + answer, PROMPT + 2 * answer], device=device)
        branches = torch.bucketize(place, ends, right=True).int().expand(2, seq)
        contexts = {"rows": torch.zeros_like(branches), "documents": branches}.get(kind, branches // 3 * 3)
        branches = torch.zeros_like(branches) if kind == "rows" else branches
        shared = kind == "shared prompts"
        positions = torch.where(branches == 2, place - answer, place) if shared else place.expand(2, seq)
        tree = (spec, positions, branches, contexts, seq)
        masked, blocks = (tree_inputs(*tree, form, lambda *_: None) for form in (None, "blocks"))
        expected = outcome("math", masked, leaves, torch.float32, **run)
        actual = outcome("flex", blocks, leaves, torch.bfloat16, **run)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert_near(actual, expected)
    assert graphs[0] == graphs[1]


@pytest.mark.only_gpu("FlexAttention has no gradients on CPUs")
@pytest.mark.parametrize(("compiled", "changes"), [
    (False, {}), ("block", {}), ("block", {"attn_logit_softcapping": 2.0, "attention_sinks": True}),
], ids=str)  # fmt: skip
def test_packed_rows_on_flex_attention(compiled: Any, changes: dict[str, Any], device: torch.device) -> None:
    """Through the model: in the graph of a block and by itself, beside the plain formula in fp32."""
    keys, results = {**WIDE, "num_kv_heads": 2, **changes}, []
    flex = {"attention_backend": "flex", "precision": "bfloat16", "compile": compiled}
    for kernel in (flex, {"attention_backend": "math"}):
        args = small(**keys, **kernel)
        stage, batch = stage_on(args, device).train(), document_batch(args).to(device)
        assert (inputs_of(stage, batch, batch.positions).blocks is not None) == (args.attention_backend == "flex")
        results.append(loss_and_gradients(stage, batch))
    (loss, grads), (expected, expected_grads) = results
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    assert_gradients(grads, expected_grads, 8e-2)


@torch.no_grad()
def test_a_packed_batch_takes_the_varlen_kernel(device: torch.device) -> None:
    values = {**WIDE, "precision": "bfloat16"}
    math_args = small(**{**WIDE, "attention_backend": "math"})
    batch = document_batch(math_args).to(device)
    stage = stage_on(small(**values), device)
    assert inputs_of(stage, batch, batch.positions).cu_seqlens is not None
    read = partial(token_logprobs, labels=batch.labels.t(), group=None)
    logprobs, expected = stage(None, batch, read), stage_on(math_args, device)(None, batch, read)
    # Logits of size ten from two blocks of bf16: 2^-8 of them, and twice that for good measure.
    assert (logprobs - expected).abs().mean() < 0.1


@pytest.mark.only_gpu("it names kernels of GPUs")
def test_auto_chooses_no_math_for_bf16_and_no_flash_for_fp32() -> None:
    bf16, fast = chosen(small(precision="bfloat16", **WIDE), "cuda").backend_by_kind, torch.cuda.get_device_capability()
    assert bf16["plain"].name == ("cudnn" if fast == (9, 0) else "flash")
    assert bf16["from a cache"].name in ("cudnn", "flash", "efficient")
    assert chosen(small(**WIDE), "cuda").backend_by_kind["plain"].name in ("efficient", "math")


@pytest.mark.only_gpu("on a CPU flash takes fp32")
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_fp32_is_refused_by_16_bit_kernels(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend: {name} "):
        chosen(small(attention_backend=name, **WIDE), "cuda")


@torch.no_grad()
def test_a_single_token_needs_no_other_choice(device: torch.device) -> None:
    """cuDNN takes no single key; a prompt may be one token long."""
    args = small(precision="bfloat16", **WIDE)
    logits = stage_on(args, device)(None, random_batch(args, seq=1).to(device))
    assert logits.isfinite().all()


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
def test_dropout_is_a_function_of_its_seed(precision: str, device: torch.device) -> None:
    args = small(precision=precision, hidden_dropout=0.1, attention_dropout=0.1, **WIDE)
    stage = stage_on(args, device).train()
    batch = random_batch(args, seed=3).to(device)
    with torch.no_grad():
        logits, repeated = (stage(None, batch) for _ in range(2))
        torch.manual_seed(99)
        reseeded, eval_logits = stage(None, batch), stage.eval()(None, batch)
    assert torch.equal(logits, repeated) and torch.equal(logits, reseeded)
    assert not torch.equal(logits, eval_logits)


CONTEXT_SEQ = 300  # no whole number of chunks


def packed_rows() -> tuple[Batch, Tensor]:
    """Two rows of documents, and which keys each query sees, boolean `[2, 1, seq, seq]`."""
    starts = torch.tensor([0, 17, 160, CONTEXT_SEQ, CONTEXT_SEQ + 299, 2 * CONTEXT_SEQ], dtype=torch.int32)
    tokens = torch.zeros(2, CONTEXT_SEQ, dtype=torch.int64)
    documents = Documents(starts, CONTEXT_SEQ - 1)
    return Batch(tokens, tokens, tokens, documents=documents), document_mask(starts, 2, CONTEXT_SEQ)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("ranks", [2, 4])
def test_queries_of_a_context_rank_equal_those_of_full_rows(
    ranks: int, window: int | None, device: torch.device
) -> None:
    """Kernels with fewer queries than keys; gradients of keys are summed over ranks."""
    leaves, (batch, mask) = qkv(device, 4, 2, CONTEXT_SEQ), packed_rows()
    run = {"num_kv_heads": 2, "sliding_window_width": window}
    full_mask = mask if window is None else mask & window_mask(CONTEXT_SEQ, window, torch.device("cpu"))
    expected = outcome("math", AttentionInputs(mask=full_mask.to(device)), leaves, torch.float32, **run)
    backend = chosen(small(**{**WIDE, **run, "precision": "bfloat16"}), device.type)
    outs, orders = [], []
    for rank in range(ranks):
        part = part_of(batch, ContextLayout(ranks), rank).to(device).context
        assert part is not None and part.keys is not None
        columns, runs = part.keys.queries, part.keys.runs
        longest, longest_keys = (torch.empty(size, 0) for size in (runs.max_seqlen, runs.max_keys))
        inputs = AttentionInputs(
            cu_seqlens=runs.cu_seqlens, longest=longest, window=-1 if window is None else window,
            runs=KeyRuns(runs.key_starts, longest_keys),
        )  # fmt: skip
        if window is not None and device.type == "cpu":
            inputs = AttentionInputs(mask=full_mask[:, :, columns])
        q, k, v = (leaf.bfloat16() for leaf in leaves)
        if inputs.runs is not None:
            k, v = (x.transpose(0, 1).flatten(0, 1)[runs.key_places].unsqueeze(1) for x in (k, v))
        outs.append(backend.attend(q[columns], k, v, inputs, AttentionOptions()))
        orders.append(part.order)
    out = torch.cat(outs)[orders[0]].float()
    assert_near([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)], expected)


def test_blocks_of_a_ring_equal_full_rows(device: torch.device) -> None:
    """The results of blocks of keys, merged, and their gradients, beside the plain formula in fp32."""
    ranks, (batch, mask) = 2, packed_rows()
    leaves = qkv(device, 4, 2, CONTEXT_SEQ)
    expected = outcome("math", AttentionInputs(mask=mask.to(device)), leaves, torch.float32, num_kv_heads=2)
    q, k, v = (leaf.detach().bfloat16().transpose(0, 1) for leaf in leaves)
    results = [torch.zeros_like(leaf) for leaf in (leaves[0], *leaves)]
    layout = ContextLayout(ranks, is_ring=True)
    parts = [part_of(batch, layout, rank).to(device).context for rank in range(ranks)]
    columns = [part.columns for part in parts if part is not None]
    for rank, part in enumerate(parts):
        assert part is not None and part.keys is not None
        queries, blocks = q[:, part.columns].flatten(0, 1), []
        out = torch.zeros(queries.shape, device=device)
        sums = torch.full(out.shape[:2], float("-inf"), device=device)
        for step, block in enumerate(part.keys.blocks):
            held = columns[(rank - step) % ranks]
            runs, keys = block.runs, torch.stack([x[:, held].flatten(0, 1) for x in (k, v)])
            ring_block = RingBlock(
                block.query_places, runs.key_places, runs.cu_seqlens, runs.key_starts, (runs.max_seqlen, runs.max_keys)
            )
            blocks.append((held, ring._runs_of(queries, keys, ring_block, step == 0, 64**-0.5)))
            ring._merge(out, sums, block.query_places, *ring._attend(blocks[-1][1]))
        grad = 2 * out.bfloat16()  # of the sum of squares
        for held, block_runs in blocks:
            places = block_runs.block.query_places
            values = [x.index_select(0, places) for x in (grad, out.bfloat16(), sums)]
            for i, (gradient, sources, targets) in enumerate(zip(
                ring._attend_backward(block_runs, *values), (places, *(block_runs.block.key_places,) * 2),
                (part.columns, held, held), strict=True,
            )):  # fmt: skip
                total = torch.zeros(2 * len(targets), *gradient.shape[1:], device=device)
                total.index_add_(0, sources, gradient.float())
                results[i + 1].index_add_(0, targets, total.unflatten(0, (2, -1)).transpose(0, 1))
        filled = torch.arange(len(part.columns), device=device) < len(part.columns.unique())
        results[0][part.columns[filled]] = out.unflatten(0, (2, -1)).transpose(0, 1)[filled]
    assert_near(results, expected)
