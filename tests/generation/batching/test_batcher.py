"""Requests that come and go: each depends on itself alone, and nothing of it is left behind."""

import random
import re
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError
from megatron.data import Batch
from megatron.generation import Batcher, Event, Model, Request, RequestError, SamplingParams
from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.neox_arguments import ConfigError
from megatron.tokenizer import CharLevelTokenizer
from tests.generation.batching.test_kv_cache import chunked
from tests.generation.models import POSITIONS, random_model
from tests.generation.runs import LAYOUTS, answers
from tests.marks import with_more
from tests.model.runs import LLAMA
from tests.pool import run_ranks

VOCAB = 64
VALUES = {**LLAMA, "max_position_embeddings": POSITIONS, "num_layers": 2}
WAYS = [SamplingParams(), SamplingParams(1.5), SamplingParams(2.0, top_k=6, repetition_penalty=1.3),
        SamplingParams(1.0, top_p=0.8, frequency_penalty=0.4),
        SamplingParams(3.0, min_p=0.05, presence_penalty=0.7)]  # fmt: skip


def model_of(world_size: int = 1, **changes: Any) -> Model:
    return random_model({**VALUES, **changes}, world_size, VOCAB)


def requests_of(count: int, seed: int = 0, longest: int = 40) -> list[Request]:
    """Returns requests of every kind, some with shared prefixes."""
    draws = random.Random(seed)
    beginning = draws.choices(range(2, 64), k=40)
    requests = []
    for i in range(count):
        tokens = beginning[: draws.choice([0, 16, 33, 40])] + draws.choices(range(2, 64), k=draws.randint(1, 25))
        requests.append(Request(tokens, draws.choice(WAYS), draws.randint(1, longest), seed=i,
                                stop=draws.choice([(), ("3", "+7")]), logprobs=draws.choice([None, 0, 3]),
                                prompt_logprobs=draws.random() < 0.2))  # fmt: skip
    return requests


def outcome(events: list[Event]) -> tuple:
    logprobs = [entry for event in events for entry in event.logprobs]
    read = [entry.logprob for entry in events[0].prompt_logprobs or () if entry is not None]
    return ([token for event in events for token in event.tokens], "".join(event.text for event in events),
            [event.finish_reason for event in events if event.finish_reason is not None],
            [[token for token, _ in entry.top] for entry in logprobs],
            torch.tensor([entry.logprob for entry in logprobs] + read))  # fmt: skip


def outcomes(batcher: Batcher, *requests: list[Request]) -> list[tuple]:
    """Returns the outcome of each request; all blocks and slots must be free again."""
    results = [outcome(events) for events in answers(batcher, *requests)]
    assert batcher.blocks.free_blocks == batcher.blocks.total
    assert sorted(batcher.scheduler.free_slots) == list(range(batcher.scheduler.maximum_rows))
    return results


def assert_same_outcomes(results: list[tuple], expected: list[tuple]) -> None:
    for actual, reference in zip(results, expected, strict=True):
        assert actual[:4] == reference[:4]
        torch.testing.assert_close(actual[4], reference[4], rtol=0, atol=1e-5)


def preemptions(batcher: Batcher) -> list[int]:
    """A list that grows with each step by how many rows had to wait again."""
    counts: list[int] = []
    grow = batcher.scheduler.grow

    def counting_grow() -> None:
        waiting_before = batcher.waiting
        grow()
        counts.append(batcher.waiting - waiting_before)

    batcher.scheduler.grow = counting_grow  # type: ignore[method-assign]
    return counts


REQUESTS = requests_of(18)


@pytest.fixture(scope="module")
def separate_results() -> list[tuple]:
    """Each by itself, without a cache."""
    model = model_of(recompute=True)
    results = [outcome(answers(Batcher(model, maximum_rows=1), [request])[0]) for request in REQUESTS]
    assert {reason for result in results for reason in result[2]} == {"stop", "length"}
    return results


# A cache of 9 blocks holds the longest request and little more: rows are preempted all the time.
@pytest.mark.parametrize(("rows", "blocks", "chunk"), [(64, None, 1024), (5, None, 7), (24, 9, 3)])
def test_together_as_alone(separate_results: list[tuple], rows: int, blocks: int | None, chunk: int) -> None:
    model = model_of()
    size = None if blocks is None else blocks * BLOCK_SIZE * model.stage.cache_bytes / 1e9
    batcher = Batcher(model, maximum_rows=rows, cache_gb=size)
    assert batcher.blocks.total > 0 and blocks in (None, batcher.blocks.total)
    preempted = preemptions(batcher)
    with chunked(chunk):
        assert_same_outcomes(outcomes(batcher, REQUESTS), separate_results)
        assert_same_outcomes(
            outcomes(batcher, REQUESTS[::-1]), separate_results[::-1]
        )  # all that was read is known now
    assert (sum(preempted) > 0) == (blocks is not None)


@pytest.mark.parametrize("processed", [False, True])
def test_log_probabilities_are_the_models_or_those_drawn_from(processed: bool) -> None:
    """Over the whole vocabulary; the latter of logits divided by the temperature."""
    model, prompt, temperature = model_of(), [5, 9, 20, 3], 2.0
    request = Request(prompt, SamplingParams(temperature), 1, seed=3, logprobs=0, processed_logprobs=processed)
    (events,) = answers(Batcher(model), [request])
    ((token,), (reported,)) = ([t for e in events for t in e.tokens], [entry for e in events for entry in e.logprobs])
    text = torch.tensor([prompt])
    with torch.no_grad():
        logits = model.stage(None, Batch(text, text, torch.ones_like(text)))[-1, 0, : model.columns]  # type: ignore[index]
    expected = (logits / (temperature if processed else 1.0)).log_softmax(-1)[token]
    assert reported.logprob == pytest.approx(float(expected), abs=1e-5)


def everywhere(rank: int, world_size: int, layout: dict[str, Any]) -> list[tuple]:
    """For the pool: half of the requests come while the others run."""
    return outcomes(Batcher(model_of(world_size, **layout), maximum_rows=9), REQUESTS[:9], REQUESTS[9:])


@pytest.mark.parametrize("name", with_more(["tp2 x pp2", "one process", "tp2", "pp2"], product=["tp2", "pp2"]))
def test_in_every_layout_as_alone(name: str, separate_results: list[tuple]) -> None:
    ranks, layout = LAYOUTS[name]
    for results in run_ranks(everywhere, ranks, layout):
        assert_same_outcomes(results, separate_results)


def test_no_mixture_leaks(separate_results: list[tuple]) -> None:
    """Finished, cancelled, preempted and refused ones, at random."""
    draws, model = random.Random(1), model_of()
    batcher = Batcher(model, maximum_rows=8, cache_gb=14 * BLOCK_SIZE * model.stage.cache_bytes / 1e9)
    events: dict[int, list[Event]] = {}
    numbers: dict[int, int] = {}
    cancelled: set[int] = set()

    def collect() -> None:
        for event in batcher.step():
            events.setdefault(event.id, []).append(event)

    for turn in range(150):
        if turn < 100:
            number = draws.randrange(len(REQUESTS))
            numbers[batcher.add(REQUESTS[number])] = number
            with pytest.raises(RequestError):
                batcher.add(Request([], maximum_tokens=1))
        if draws.random() < 0.4:
            id = draws.choice(list(numbers))
            done = id in events and events[id][-1].finish_reason is not None
            batcher.cancel(id)
            cancelled |= set() if done else {id}
        collect()
    while batcher.busy:
        collect()
    assert batcher.blocks.free_blocks == batcher.blocks.total
    assert (batcher.running, batcher.waiting, batcher.step()) == (0, 0, [])
    assert events.keys() == numbers.keys() and 10 < len(cancelled) < 90
    for id, events_of_id in events.items():
        assert [event.finish_reason for event in events_of_id[:-1]] == [None] * (len(events_of_id) - 1)
        assert (events_of_id[-1].finish_reason == "cancelled") == (id in cancelled)
    completed = [id for id in events if id not in cancelled]
    assert_same_outcomes([outcome(events[id]) for id in completed], [separate_results[numbers[id]] for id in completed])


def test_cancelling_frees_blocks_at_once() -> None:
    batcher = Batcher(model_of(), maximum_rows=60)
    ids = [batcher.add(Request([i % 60 + 2] * 20, maximum_tokens=50, stop_token_ids=())) for i in range(80)]
    batcher.step(), batcher.step()
    assert batcher.running == 60 and batcher.waiting == 20
    for id in ids[10:70]:
        batcher.cancel(id)
    batcher.cancel(ids[10]), batcher.cancel(12345)
    blocks = batcher.blocks
    assert blocks.total - blocks.free_blocks == 2 * 10 and (batcher.running, batcher.waiting) == (10, 10)
    cancelled = [event for event in batcher.step() if event.finish_reason == "cancelled"]
    assert sorted(event.id for event in cancelled) == ids[10:70]


def test_beginnings_are_run_once() -> None:
    """A prefix of many requests, or of a conversation's next turn, is computed once."""
    model, token_counts = model_of(), []
    model.stage.layers["0"].register_forward_pre_hook(lambda _, inputs: token_counts.append(inputs[0].numel()))
    batcher = Batcher(model)
    system = list(range(2, 62))
    events = answers(batcher, [Request([*system, i], maximum_tokens=2, stop_token_ids=()) for i in range(10)])
    assert sum(token_counts) < 61 + 10 * (61 - 48 + 2) + 20
    token_counts.clear()
    generated = [token for event in events[3] for token in event.tokens]
    answers(batcher, [Request([*system, 3, *generated, 7], maximum_tokens=1)])
    assert sum(token_counts) <= 64 - 48


@pytest.mark.parametrize(("request_", "message"), [
    (Request([]), "prompt is empty"),
    (Request([3, 64]), "do not exist.* 0 to 63"),
    (Request([-1]), "do not exist"),
    (Request([3] * 66, maximum_tokens=64), " 66 .*maximum_tokens is 64; .* 128 "),
    (Request([3] * 60, maximum_tokens=40), "KV cache .* 80 tokens"),
    (Request([3], maximum_tokens=0), "maximum_tokens is 0"),
    (Request([3], logprobs=65), "logprobs is 65: .* 0 to 64"),
    (Request([3], stop=("a",), text=False), "text=True"),
])  # fmt: skip
def test_refused(request_: Request, message: str) -> None:
    model = model_of()
    batcher = Batcher(model, cache_gb=5 * BLOCK_SIZE * model.stage.cache_bytes / 1e9)
    with pytest.raises(RequestError, match=message):
        batcher.add(request_)
    assert not batcher.busy and batcher.blocks.free_blocks == batcher.blocks.total == 5


def test_an_automatic_size_is_told_and_a_cache_that_holds_nothing_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_gb: 1e-09 .* 16 tokens"):
        Batcher(model_of(kv_cache_gb=1e-9))
    log_lines: list[str] = []
    batcher = Batcher(model_of(), maximum_rows=3, log=log_lines.append)
    assert batcher.blocks.total == 3 * POSITIONS // BLOCK_SIZE  # memory is no bound here
    size = f"{3 * POSITIONS * batcher.model.stage.cache_bytes / 1e9:.3g}"
    assert len(log_lines) == 1 and re.match(f"kv_cache_gb: auto chose {size}.* 384 tokens", log_lines[0])
    assert Batcher(model_of(), maximum_rows=3, tokens=100).blocks.total == 9


def test_a_text_ends_with_the_tokens_asked_for() -> None:
    batcher = Batcher(model_of())
    unstopped = outcome(answers(batcher, [Request([9, 9], maximum_tokens=9, stop_token_ids=())])[0])[0]
    stopped = outcome(answers(batcher, [Request([9, 9], maximum_tokens=9, stop_token_ids=(63, unstopped[4]))])[0])
    assert (stopped[0], stopped[2]) == (unstopped[: unstopped.index(unstopped[4]) + 1], ["stop"])
    assert stopped[1] == CharLevelTokenizer().detokenize(stopped[0][:-1])


def test_what_is_not_a_number_ends_all_and_leaks_nothing() -> None:
    model = model_of()
    batcher = Batcher(model)
    batcher.add(Request([3] * 30)), batcher.add(Request([4] * 3))
    batcher.step()
    with torch.no_grad():
        next(model.stage.layers["5"].parameters()).fill_(float("nan"))
    with pytest.raises(CheckpointError, match="NaN .*fp32"):
        batcher.step()
    assert not batcher.busy and batcher.blocks.free_blocks == batcher.blocks.total
