"""Requests to a `Batcher`, and the events that it answers with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.generation.sampling import SamplingParams
from megatron.neox_arguments.errors import UserError

FinishReason = Literal["stop", "length", "cancelled"]


class RequestError(UserError, ValueError):
    """Raised for a request to the model that cannot be served. The message says why, and which values are
    allowed."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and the settings for its continuation.

    tokens: token ids of the prompt, at least one.
    maximum_tokens: most tokens to generate; 0 is allowed only with prompt_logprobs.
    sampling: how tokens are chosen.
    seed: seed of the request's own random generator; the result does not depend on other requests.
    stop: strings that end the text; the text ends before the first of them.
    stop_token_ids: token ids that end the text; None: the model's.
    logprobs: number of most likely tokens to report for each generated token, beside its own log-probability;
        0: only its log-probability; None: no log-probabilities.
    processed_logprobs: compute log-probabilities from logits divided by the temperature, without filters and
        penalties (named as in vLLM).
    prompt_logprobs: also report log-probabilities of the prompt's tokens.
    text: whether events hold text; must be true with `stop`.
    minimum_tokens: number of generated tokens before which stop tokens and stop strings are ignored.
    adapter: number of the LoRA adapter, if several are served; 0: none.
    """

    tokens: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    maximum_tokens: int = 64
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    text: bool = True
    minimum_tokens: int = 0
    adapter: int = 0
    processed_logprobs: bool = False


class Logprob(NamedTuple):
    """The log-probability that the model gives to a token.

    It is computed before temperature and penalties are applied, unless `Request.processed_logprobs` is set.

    top: (id, log-probability) of the most likely tokens at this position, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """The output of one step for the request `id`.

    tokens: new tokens, including a stop token.
    text: new text; empty while a character is incomplete or a stop string may have begun. The full text is
        the texts of all events joined.
    logprobs: one per new token, if requested.
    finish_reason: None if more events follow; "stop" after a stop token or stop string, "length" after
        maximum_tokens, "cancelled" after a cancellation.
    prompt_logprobs: only in the first event, if requested: one per token of the prompt, None for its first
        token, which has no token before it.
    """

    id: int
    tokens: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[Logprob] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: Sequence[Logprob | None] | None = None
