"""The cache of keys and values against running every text from its beginning, in every layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.generation import Batcher, Model, Request, SamplingParams, complete
from megatron.generation.batching import batcher as batching
from tests.generation.models import STATE_MODELS, UNTIED, random_model
from tests.generation.runs import LAYOUTS, answers
from tests.marks import with_more
from tests.model.runs import MODELS
from tests.pool import run_ranks

# The last two begin alike, over more than a block.
PROMPTS = [[5, 3, 9, 9, 1, 2, 4], [7], [6, 1], [3, 8, 2] * 6, [3, 8, 2] * 6 + [4]]
POSITIONS = 32  # of tests.model.stages.SMALL
TO_COME = POSITIONS - max(map(len, PROMPTS))  # the longest text uses every position there is
SAMPLINGS = (SamplingParams(), SamplingParams(2.0, top_k=9, top_p=0.95, repetition_penalty=1.1))


class Outputs(NamedTuple):
    """logprobs: of all tokens of each prompt; texts: for each of `SAMPLINGS`."""

    logprobs: list[Tensor]
    texts: list[list[tuple[list[int], bool]]]


@contextmanager
def chunked(tokens: int) -> Iterator[None]:
    original = batching._PREFILL
    batching._PREFILL = {"cpu": tokens}  # type: ignore[misc]
    try:
        yield
    finally:
        batching._PREFILL = original  # type: ignore[misc]


def logprobs_of(model: Model) -> list[Tensor]:
    """`[length - 1, vocab]` of each prompt: read in chunks, through the cache where there is one."""
    vocab = model.tokenizer.vocab_size
    requests = [Request(prompt, maximum_tokens=1, prompt_logprobs=True, logprobs=vocab) for prompt in PROMPTS]
    with chunked(5):
        firsts = [events[0] for events in answers(Batcher(model), requests)]
    logprobs = []
    for event, prompt in zip(firsts, PROMPTS, strict=True):
        assert event.prompt_logprobs is not None and event.prompt_logprobs[0] is None
        reported = [entry for entry in event.prompt_logprobs[1:] if entry is not None]
        rows = [dict(entry.top) for entry in (*reported, *event.logprobs)]
        logprobs.append(torch.tensor([[row[i] for i in range(vocab)] for row in rows]))
        assert [entry.token for entry in reported] == prompt[1:]
        assert [entry.logprob for entry in reported] == [
            row[token] for row, token in zip(rows, prompt[1:], strict=False)
        ]
    return logprobs


def find(values: dict[str, Any], world_size: int = 1) -> Outputs:
    model = random_model(values, world_size)
    runs = [complete(model, PROMPTS, sampling, maximum_tokens=TO_COME, seeds=range(5)) for sampling in SAMPLINGS]
    return Outputs(
        logprobs_of(model), [[(completion.tokens, completion.finished) for completion in run] for run in runs]
    )


def find_all(rank: int, world_size: int, layout: dict[str, Any]) -> dict[str, Outputs]:
    """For the pool."""
    return {name: find({**values, **layout}, world_size) for name, values in UNTIED.items()}


@pytest.fixture(scope="module")
def recomputed() -> dict[str, Outputs]:
    outputs = {name: find({**values, "recompute": True}) for name, values in UNTIED.items()}
    lengths = [{len(tokens) for run in outputs[name].texts for tokens, _ in run} for name in UNTIED]
    assert min(map(len, lengths)) > 1 and TO_COME in set.union(*lengths), "rows must end at different times"
    assert all(len({str(run) for run in outputs[name].texts}) == 2 for name in UNTIED), "sampling must matter"
    return outputs


# "dp2" runs one process twice.
@pytest.mark.parametrize(
    "name", with_more([name for name in LAYOUTS if name != "dp2"], product=LAYOUTS.keys() - {"one process", "dp2"})
)
def test_cache_changes_no_token_in_any_layout(name: str, recomputed: dict[str, Outputs]) -> None:
    ranks, layout = LAYOUTS[name]
    for outputs in run_ranks(find_all, ranks, layout):
        for model, (logprobs, texts) in outputs.items():
            assert texts == recomputed[model].texts, model
            for actual, expected in zip(logprobs, recomputed[model].logprobs, strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=model)


@pytest.mark.parametrize("name", sorted(set(UNTIED) - {"moe"}))  # whose tokens find other experts by rounding alone
def test_bf16(name: str) -> None:
    """The bound holds for states too, in fp32 or in the 16 bits of the weights."""
    values = {**UNTIED[name], "precision": "bfloat16"}
    exact, rounded, cached = (logprobs_of(random_model({**values, **changes})) for changes in (
        {"precision": "fp32", "recompute": True}, {"recompute": True}, {},
    ))  # fmt: skip
    # The cache may move a log-probability as far as bf16 itself does, no further.
    error = max(float((a - b).abs().max()) for a, b in zip(rounded, exact, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(cached, exact, strict=True)) < 1.5 * error
    if name in STATE_MODELS:
        if name not in ("delta", "kimi"):
            narrow = logprobs_of(random_model({**values, "mamba_state_fp32": False}))
            assert all(logprobs.isfinite().all() for logprobs in narrow)
        return
    cache = random_model(values).stage.empty_cache(2, 3)
    assert {layer.keys.dtype for layer in cache.layers.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", *STATE_MODELS])
def test_nothing_of_a_cache_before_a_text_changes_a_bit_of_it(name: str) -> None:
    """Neither padding, nor what earlier texts left in blocks and slots; also of prompts of one token."""
    model, logprobs = random_model(UNTIED[name]), []
    requests = [Request(prompt, maximum_tokens=5, stop_token_ids=(), logprobs=0) for prompt in [*PROMPTS, [9], [5] * 9]]
    for dirt in (0.0, 1e3):
        batcher = Batcher(model, maximum_rows=2)
        assert batcher.cache is not None
        for layer in batcher.cache.layers.values():
            for tensor in layer[:2]:
                tensor.fill_(dirt)
        with chunked(4):
            logprobs.append([[event.logprobs for event in row] for row in answers(batcher, requests)])
    assert logprobs[0] == logprobs[1]


def shapes(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """For the pool: of the caches that this rank of tp2 x pp2 holds."""
    model = random_model({**MODELS["llama"], **LAYOUTS["tp2 x pp2"][1]}, world_size)
    cache = model.stage.empty_cache(3, 20)
    assert model.stage.cache_bytes * 3 * 20 == sum(x.nbytes for layer in cache.layers.values() for x in layer[:2])
    return [tuple(sorted(tensor.shape)) for layer in cache.layers.values() for tensor in layer[:2]]


def test_a_rank_caches_its_own_layers_and_heads() -> None:
    assert run_ranks(shapes, 4) == [[(1, 3, 8, 20)] * 4] * 4  # two of four layers, one of two key-value heads


def forward_shapes(recompute: bool) -> list[tuple[int, int]]:
    """Rows and columns of every forward, whose head runs one token a row."""
    model, shapes, heads = random_model({**MODELS["llama"], "recompute": recompute}), [], []
    layers = model.stage.layers
    layers["0"].register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    layers["8"].register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0].shape[:2].numel()))
    complete(model, PROMPTS[:4], SamplingParams(1.0), maximum_tokens=TO_COME, seeds=range(4))
    assert heads == [rows for rows, _ in shapes]
    return shapes


def test_a_step_runs_one_token_of_unfinished_rows() -> None:
    cached, recomputed = forward_shapes(recompute=False), forward_shapes(recompute=True)
    assert sum(rows * columns for rows, columns in cached) < sum(rows * columns for rows, columns in recomputed)
    longest = max(i for i, (_, columns) in enumerate(cached) if columns > 1)
    rows = [rows for rows, _ in cached[longest + 1 :]]
    assert longest < 4 < len(rows)
    assert rows[0] > 1 and rows == sorted(rows, reverse=True) and rows[-1] < rows[0], "finished rows leave"
