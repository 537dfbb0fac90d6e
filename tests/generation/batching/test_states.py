"""Texts of models with states (Mamba, Mamba 2, hybrids): each depends on itself alone, in every layout."""

from typing import Any

import pytest

from megatron.generation import Batcher, Model, Request, SamplingParams
from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.neox_arguments import ConfigError
from tests.generation.batching.test_batcher import (
    VOCAB,
    assert_same_outcomes,
    outcome,
    outcomes,
    preemptions,
    requests_of,
)
from tests.generation.batching.test_kv_cache import chunked
from tests.generation.models import POSITIONS, random_model
from tests.generation.models import STATE_MODELS as MODELS
from tests.generation.runs import LAYOUTS, answers
from tests.marks import with_more
from tests.pool import run_ranks

REQUESTS = requests_of(8, seed=3, longest=20)


def model_of(name: str, world_size: int = 1, **changes: Any) -> Model:
    return random_model({**MODELS[name], **changes}, world_size, VOCAB)


@pytest.fixture(scope="module")
def separate_results() -> dict[str, list[tuple]]:
    """Each request by itself, without a cache."""
    results = {}
    for name in MODELS:
        model = model_of(name, recompute=True)
        results[name] = [outcome(answers(Batcher(model, maximum_rows=1), [request])[0]) for request in REQUESTS]
        assert max(len(set(result[0])) for result in results[name]) > 4, f"texts of {name} must be lively"
    return results


@pytest.mark.parametrize(("name", "rows", "chunk"),
                         [("mamba", 3, 7), ("mamba 2", 5, 2), ("hybrid", 3, 7), ("hybrid", 10, 1024),
                          ("delta", 3, 7), ("kimi", 10, 7)])  # fmt: skip
def test_together_as_alone(name: str, rows: int, chunk: int, separate_results: dict[str, list[tuple]]) -> None:
    """Slots go from one request to the next; prompts are read in chunks, shorter than the convolution too."""
    batcher = Batcher(model_of(name), maximum_rows=rows)
    with chunked(chunk):
        for order in (slice(None), slice(None, None, -1)) if rows == 3 else (slice(None),):
            assert_same_outcomes(outcomes(batcher, REQUESTS[order]), separate_results[name][order])


def everywhere(rank: int, world_size: int, layout: dict[str, Any]) -> dict[str, list[tuple]]:
    """For the pool: half of the requests come while the others run."""
    results = {}
    for name in MODELS:
        batcher = Batcher(model_of(name, world_size, **layout), maximum_rows=4)
        with chunked(20):
            results[name] = outcomes(batcher, REQUESTS[:5], REQUESTS[5:])
    return results


@pytest.mark.more
@pytest.mark.parametrize("layout", with_more(["tp2", "pp2", "tp2 x pp2"], product=["tp2", "pp2"]))
def test_in_every_layout_as_alone(layout: str, separate_results: dict[str, list[tuple]]) -> None:
    ranks, values = LAYOUTS[layout]
    for results in run_ranks(everywhere, ranks, values):
        for name in MODELS:
            assert_same_outcomes(results[name], separate_results[name])


def test_preempted_requests_restart() -> None:
    """A cache of 9 blocks beside the states: five rows begin, and have room to grow for two of them."""
    requests = [Request([i + 2, 7, 9], SamplingParams(1.5), 50, i, stop_token_ids=(), logprobs=0) for i in range(9)]
    expected = [outcome(events) for events in answers(Batcher(model_of("hybrid", recompute=True)), requests)]
    model, rows = model_of("hybrid"), 6
    size = rows * model.stage.state_bytes + 9 * BLOCK_SIZE * model.stage.cache_bytes
    batcher = Batcher(model, maximum_rows=rows, cache_gb=size / 1e9)
    assert batcher.blocks.total == 9
    times = preemptions(batcher)
    with chunked(11):
        assert_same_outcomes(outcomes(batcher, requests), expected)
    assert sum(times) > 3, times


def test_cancelling_frees_slots_at_once(separate_results: dict[str, list[tuple]]) -> None:
    for name in MODELS:
        batcher = Batcher(model_of(name), maximum_rows=4)
        ids = [batcher.add(Request([i + 2] * 20, maximum_tokens=50, stop_token_ids=())) for i in range(6)]
        batcher.step(), batcher.step()
        for id in ids[1:5]:
            batcher.cancel(id)
        assert (batcher.running, batcher.waiting, len(batcher.scheduler.free_slots)) == (1, 1, 3)
        assert_same_outcomes(outcomes(batcher, REQUESTS), separate_results[name])


def test_equal_beginnings_are_not_shared() -> None:
    """A block of keys and values could be, the state behind it is there no more."""
    model, token_counts = model_of("hybrid"), []
    model.stage.layers["0"].register_forward_pre_hook(lambda _, inputs: token_counts.append(inputs[0].numel()))
    batcher, system = Batcher(model), list(range(2, 42))
    answers(batcher, [Request([*system, i], maximum_tokens=1) for i in range(3)])
    assert sum(token_counts) == 3 * 41


def test_states_take_their_part_of_the_cache() -> None:
    log_lines: list[str] = []
    model = model_of("mamba")
    batcher = Batcher(model, maximum_rows=3, tokens=100, log=log_lines.append)
    size = 3 * model.stage.state_bytes / 1e9
    assert len(log_lines) == 1 and f"kv_cache_gb: auto chose {size:.3g}" in log_lines[0] and "3 texts" in log_lines[0]
    assert batcher.blocks.total == 0 and len(answers(batcher, REQUESTS)) == len(REQUESTS)
    Batcher(model, maximum_rows=3, cache_gb=size)
    with pytest.raises(ConfigError, match=r"kv_cache_gb: .* states of 4 texts"):
        Batcher(model, maximum_rows=4, cache_gb=size)
    hybrid = model_of("hybrid")
    states, token = hybrid.stage.state_bytes, hybrid.stage.cache_bytes
    held = Batcher(hybrid, maximum_rows=2, cache_gb=(2 * states + 5 * BLOCK_SIZE * token) / 1e9)
    assert held.blocks.total == 5
    with pytest.raises(ConfigError, match="kv_cache_gb: .* 16 tokens .* states of 2 texts"):
        Batcher(hybrid, maximum_rows=2, cache_gb=(2 * states + token) / 1e9)
    log_lines.clear()
    Batcher(hybrid, maximum_rows=2, log=log_lines.append)
    assert f" {2 * POSITIONS} tokens" in log_lines[0] and "2 texts" in log_lines[0]
