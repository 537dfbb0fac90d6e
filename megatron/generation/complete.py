"""Continues a list of prompts, in batches, until all texts have ended."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron.distributed import run_on_all_ranks_of
from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import Event, Logprob, Request
from megatron.generation.sampling import SamplingParams
from megatron.model import Model

T = TypeVar("T")
MAXIMUM_ROWS = 64


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    tokens: generated token ids, without the stop token.
    text: the generated text, which ends before a stop string.
    finished: whether a stop token or a stop string ended the text; False: it has `maximum_tokens` tokens.
    seconds: time from the call of `complete` to the last token of this completion.
    logprobs: log-probabilities of `tokens`; empty if not requested.
    """

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
    """Continues prompts, at most `maximum_rows` at a time, and returns a completion for each, in order.

    All ranks of a model call this function together with the same arguments. Raises RequestError for a prompt
    that is empty or too long, CheckpointError for NaN logits.

    maximum_tokens: most tokens to generate, one value for all prompts or one per prompt.
    seeds: one per prompt; a completion depends on its own seed, not on other prompts.
    stop: strings that end a text.
    stop_token_ids: tokens that end a text; None: the model's.
    logprobs, processed_logprobs: as in `Request`.
    on_event: called with every event; `event.id` is the prompt's index in `prompts`.
    """
    start_time = time.perf_counter()
    stop_token_ids = model.stop_token_ids if stop_token_ids is None else stop_token_ids
    limits = [maximum_tokens] * len(prompts) if isinstance(maximum_tokens, int) else maximum_tokens
    tokens = sum(map(len, prompts)) + sum(limits)
    batcher = Batcher(model, maximum_rows=min(maximum_rows, max(len(prompts), 1)), tokens=tokens)
    for prompt, limit, seed in zip(prompts, limits, seeds, strict=True):
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
    return [completion for completion in done if completion is not None]


def prompts_of_all_ranks(model: Model, prompts: list[T]) -> tuple[list[T], slice]:
    """Returns the prompts that this data-parallel rank must run, and the slice of them that are its own
    prompts.

    A rank usually runs only its own prompts. With `model.lockstep` every data-parallel rank must run the
    prompts of all of them, so all call this function together.

    prompts: this rank's own prompts.
    """
    if not model.lockstep:
        return prompts, slice(None)
    groups = model.groups
    shares = run_on_all_ranks_of(groups.group("data"), groups.size("data"), lambda: prompts)
    start = sum(map(len, shares[: groups.rank("data")]))
    return [prompt for share in shares for prompt in share], slice(start, start + len(prompts))
