"""Texts of models with states (Mamba, Mamba 2, hybrids): what becomes of one depends on itself alone, in
every layout."""

from typing import Any

import pytest
import torch

from megatron.generation import Batcher, Model, Request, SamplingParams, complete
from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.neox_arguments import ConfigError
from tests.generation.batching.test_batcher import Bytes, outcome, requests_of, same
from tests.generation.batching.test_kv_cache import Few, chunked, logprobs_of, random_model
from tests.generation.runs import LAYOUTS, answers
from tests.generation.state_models import HYBRID, MODELS, POSITIONS
from tests.marks import with_more
from tests.pool import run_ranks

REQUESTS = requests_of(10, seed=3)


def model_of(name: str, world_size: int = 1, **changes: Any) -> Model:
    loaded = random_model({**MODELS[name], **changes}, world_size)
    return Model(loaded.args, loaded.groups, Bytes(), loaded.stage, loaded.dtype)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple]]:
    """Each request by itself, without a cache."""
    found = {}
    for name in MODELS:
        model = model_of(name, recompute=True)
        found[name] = [outcome(answers(Batcher(model, maximum_rows=1), [request])[0]) for request in REQUESTS]
        assert max(len(set(one[0])) for one in found[name]) > 4, f"texts of {name} must be lively"
    return found


def leaves_nothing(batcher: Batcher) -> bool:
    return batcher.blocks.free_blocks == batcher.blocks.total and sorted(batcher.scheduler.free_slots) == list(
        range(batcher.scheduler.maximum_rows)
    )


# A prompt of one token is the whole text: its states begin, whatever the slot held.
SHORT = [Request([token], maximum_tokens=6, logprobs=0, stop_token_ids=()) for token in (9, 30, 9)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("rows", "chunk"), [(10, 1024), (3, 7), (5, 2)])
def test_together_as_alone(name: str, rows: int, chunk: int, alone: dict[str, list[tuple]]) -> None:
    """Slots go from one request to the next; prompts are read in chunks, also in such that are shorter than
    the convolution."""
    batcher = Batcher(model_of(name), maximum_rows=rows)
    with chunked(chunk):
        for order in (slice(None), slice(None, None, -1)) if rows == 3 else (slice(None),):
            same([outcome(events) for events in answers(batcher, REQUESTS[order])], alone[name][order])
    assert leaves_nothing(batcher)


def everywhere(rank: int, world_size: int, layout: dict[str, Any]) -> dict[str, list[tuple]]:
    """For the pool: half of the requests come while the others run."""
    found = {}
    for name in MODELS:
        batcher = Batcher(model_of(name, world_size, **layout), maximum_rows=4)
        events: dict[int, list[Any]] = {}
        ids = [batcher.add(request) for request in REQUESTS[:5]]
        late = list(REQUESTS[5:])
        with chunked(20):
            while batcher.busy or late:
                for event in batcher.step():
                    events.setdefault(event.id, []).append(event)
                if late:
                    ids.append(batcher.add(late.pop(0)))
        assert leaves_nothing(batcher)
        found[name] = [outcome(events[id]) for id in ids]
    return found


@pytest.mark.parametrize("layout", with_more(["tp2", "pp2", "tp2 x pp2"], "tp2 x pp2"))
def test_in_every_layout_as_alone(layout: str, alone: dict[str, list[tuple]]) -> None:
    ranks, values = LAYOUTS[layout]
    for found in run_ranks(everywhere, ranks, values):
        for name, outcomes in found.items():
            same(outcomes, alone[name])


def test_slots_hold_nothing_of_earlier_texts() -> None:
    """What is in a cache before a text changes no bit of it: of prompts of one token too, and of such that
    end in a chunk of their own."""
    requests = [*SHORT, Request([5] * 9, maximum_tokens=4, logprobs=0, stop_token_ids=())]
    for name in MODELS:
        found = []
        for dirt in (0.0, 1e3):
            batcher = Batcher(model_of(name), maximum_rows=2)
            assert batcher.cache is not None
            for layer in batcher.cache.layers.values():
                for tensor in layer[:2]:
                    tensor.fill_(dirt)
            with chunked(4):
                events = answers(batcher, requests)
            found.append([[event.logprobs for event in row] for row in events])
        assert found[0] == found[1], name


def test_preempted_ones_begin_anew() -> None:
    """A cache of 9 blocks beside the states: five rows begin, and have room to grow for two of them."""
    requests = [Request([i + 2, 7, 9], SamplingParams(1.5), 50, i, stop_token_ids=(), logprobs=0) for i in range(9)]
    expected = answers(Batcher(model_of("hybrid", recompute=True)), requests)
    model, rows = model_of("hybrid"), 6
    size = rows * model.stage.state_bytes + 9 * BLOCK_SIZE * model.stage.cache_bytes
    batcher = Batcher(model, maximum_rows=rows, cache_gb=size / 1e9)
    assert batcher.blocks.total == 9
    times: list[int] = []
    grow = batcher.scheduler.grow

    def counted() -> None:
        before = batcher.waiting
        grow()
        times.append(batcher.waiting - before)

    batcher.scheduler.grow = counted  # type: ignore[method-assign]
    with chunked(11):
        same(*([outcome(events) for events in run] for run in (answers(batcher, requests), expected)))
    assert sum(times) > 3, times
    assert leaves_nothing(batcher)


def test_cancelling_frees_slots_at_once(alone: dict[str, list[tuple]]) -> None:
    for name in MODELS:
        batcher = Batcher(model_of(name), maximum_rows=4)
        gone = [batcher.add(Request([i + 2] * 20, maximum_tokens=50, stop_token_ids=())) for i in range(6)]
        batcher.step(), batcher.step()
        for id in gone[1:5]:
            batcher.cancel(id)
        assert (batcher.running, batcher.waiting, len(batcher.scheduler.free_slots)) == (1, 1, 3)
        ids = [batcher.add(request) for request in REQUESTS]
        events: dict[int, list[Any]] = {}
        while batcher.busy:
            for event in batcher.step():
                events.setdefault(event.id, []).append(event)
        same([outcome(events[id]) for id in ids], alone[name])
        assert leaves_nothing(batcher)


def test_equal_beginnings_are_not_shared() -> None:
    """A block of keys and values could be, the state behind it is there no more."""
    model, seen = model_of("hybrid"), []
    model.stage.layers["0"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    batcher, system = Batcher(model), list(range(2, 42))
    answers(batcher, [Request([*system, i], maximum_tokens=1) for i in range(3)])
    assert sum(seen) == 3 * 41


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_through_the_cache(name: str) -> None:
    found = []
    for recompute in (False, True):
        found.append(logprobs_of(random_model({**MODELS[name], "recompute": recompute})))
    for cached, whole in zip(*found, strict=True):
        torch.testing.assert_close(cached, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bf16(name: str) -> None:
    """The state is fp32 beside 16-bit weights, or as they are."""
    values = {**MODELS[name], "precision": "bfloat16"}
    exact, rounded, cached = (
        logprobs_of(random_model({**values, **changes}))
        for changes in ({"precision": "fp32", "recompute": True}, {"recompute": True}, {})
    )
    error = max(float((a - b).abs().max()) for a, b in zip(rounded, exact, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(cached, exact, strict=True)) < 1.5 * error
    narrow = logprobs_of(random_model({**values, "mamba_state_fp32": False}))
    assert all(logprobs.isfinite().all() for logprobs in narrow)


# -- memory --------------------------------------------------------------------------------------------------


def test_states_take_their_part_of_the_cache() -> None:
    log_lines: list[str] = []
    model = model_of("mamba")
    batcher = Batcher(model, maximum_rows=3, tokens=100, log=log_lines.append)
    size = 3 * model.stage.state_bytes / 1e9
    assert log_lines == [f"kv_cache_gb: auto chose {size:.3g}, for the states of 3 texts"]
    assert batcher.blocks.total == 0 and len(answers(batcher, REQUESTS)) == len(REQUESTS)
    Batcher(model, maximum_rows=3, cache_gb=size)
    with pytest.raises(ConfigError, match=r"kv_cache_gb: .* GB do not hold the states of 4 texts at once, which take"):
        Batcher(model, maximum_rows=4, cache_gb=size)
    hybrid = model_of("hybrid")
    states, token = hybrid.stage.state_bytes, hybrid.stage.cache_bytes
    held = Batcher(hybrid, maximum_rows=2, cache_gb=(2 * states + 5 * BLOCK_SIZE * token) / 1e9)
    assert held.blocks.total == 5
    with pytest.raises(ConfigError, match="GB hold no 16 tokens beside the states of 2 texts"):
        Batcher(hybrid, maximum_rows=2, cache_gb=(2 * states + token) / 1e9)
    log_lines.clear()
    Batcher(hybrid, maximum_rows=2, log=log_lines.append)
    assert log_lines[0].endswith(f"for {2 * POSITIONS} tokens and the states of 2 texts")


def test_as_many_texts_as_end_by_themselves() -> None:
    """Sampled, and of few tokens, among which is the end of document."""
    runs = []
    for recompute in (False, True):
        model = random_model({**HYBRID, "recompute": recompute})
        assert isinstance(model.tokenizer, Few)
        runs.append(
            complete(model, [[i % 9 + 1] * (i % 5 + 1) for i in range(20)], SamplingParams(1.0), maximum_tokens=30,
                     seeds=range(20), maximum_rows=4)
        )  # fmt: skip
    assert [one.tokens for one in runs[0]] == [one.tokens for one in runs[1]]
    assert len({len(one.tokens) for one in runs[0]}) > 5
