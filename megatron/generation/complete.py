"""Continuing a list of prompts, in batches, until all have ended."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import Event, Logprob, Request
from megatron.generation.sampling import SamplingParams
from megatron.model import Model

MAXIMUM_ROWS = 64


@dataclass(frozen=True)
class Completion:
    """tokens: generated ids, without the one that ended the text; text: of them, up to a stop string;
    finished: whether an end token or a stop string came; seconds: until the last one; logprobs: of `tokens`,
    empty if not asked for."""

    tokens: list[int]
    text: str
    finished: bool
    seconds: float
    logprobs: list[Logprob] = field(default_factory=list)


def complete(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    maximum_tokens: int | Sequence[int],
    seeds: Sequence[int],
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] | None = None,
    logprobs: int | None = None,
    processed_logprobs: bool = False,
    maximum_rows: int = MAXIMUM_ROWS,
    on_event: Callable[[Event], None] = lambda event: None,
) -> list[Completion]:
    """Continue prompts to their end or by `maximum_tokens`, at most `maximum_rows` at a time.

    maximum_tokens: of every prompt, or one a prompt. seeds: one a prompt: what a row becomes depends on it,
    not on the rows beside it. stop: strings that end a text; stop_token_ids: tokens that do, None: the
    model's. logprobs, processed_logprobs: as of a `Request`. on_event: called with every event; its id is
    the prompt's place in `prompts`. All ranks of a model call it together with the same arguments. Raises
    RequestError for a prompt that is empty or too long, CheckpointError when logits are not numbers.
    """
    start_time = time.perf_counter()
    stop_token_ids = model.stop_token_ids if stop_token_ids is None else stop_token_ids
    most = [maximum_tokens] * len(prompts) if isinstance(maximum_tokens, int) else maximum_tokens
    tokens = sum(map(len, prompts)) + sum(most)
    batcher = Batcher(model, maximum_rows=min(maximum_rows, max(len(prompts), 1)), tokens=tokens)
    for prompt, limit, seed in zip(prompts, most, seeds, strict=True):
        batcher.add(
            Request(
                prompt, sampling, limit, seed, stop, stop_token_ids, logprobs,
                processed_logprobs=processed_logprobs, text=bool(stop),
            )
        )  # fmt: skip
    ids: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    reported: list[list[Logprob]] = [[] for _ in prompts]
    done: list[Completion | None] = [None] * len(prompts)
    while batcher.busy:
        for event in batcher.step():
            row = event.id
            ids[row] += event.tokens
            texts[row] += event.text
            reported[row] += event.logprobs
            if event.finish_reason is not None:
                generated = ids[row][:-1] if ids[row][-1] in stop_token_ids else ids[row]
                text = texts[row] if stop else model.tokenizer.detokenize(generated)
                seconds = time.perf_counter() - start_time
                done[row] = Completion(
                    generated, text, event.finish_reason == "stop", seconds, reported[row][: len(generated)]
                )
            on_event(event)
    return [one for one in done if one is not None]
