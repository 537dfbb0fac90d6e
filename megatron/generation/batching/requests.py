"""Requests to a `Batcher`, and the events that it answers with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.generation.sampling import SamplingParams
from megatron.neox_arguments.errors import UserError

FinishReason = Literal["stop", "length", "cancelled"]


class RequestError(UserError, ValueError):
    """A request that cannot be served; the message says why and what would be."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and how.

    tokens: of the prompt, at least one. maximum_tokens: to generate; 0 only with prompt_logprobs. seed: of
    its own random generator, so that the result depends on nothing else in the batch. stop: the text ends
    before the first of these strings. stop_token_ids: ids that end the text, None: the model's. logprobs: how
    many most likely tokens are reported beside each generated one; 0: its own log-probability alone, None:
    nothing. processed_logprobs: these are of the logits divided by the temperature (vLLM's word), without
    filters and penalties. prompt_logprobs: the same of the prompt's tokens. text: whether events hold text;
    stop strings need it. minimum_tokens: generated before a stop token or stop string counts.
    adapter: the number of its adapters among those that are served at once; 0: none.
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
    """The model's own log-probability of a token (before temperature and penalties, unless
    `Request.processed_logprobs`), and the most likely ones with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """What a step brought to the request `id`.

    tokens: new ones, the one that ends the text among them. text: new, held back while it may be the
    beginning of a stop string or half a character; all texts of a request together are its text. logprobs:
    one a token, if asked for. finish_reason: None while more may come; "stop" after a stop token or stop
    string, "length" after maximum_tokens, "cancelled". prompt_logprobs: in the first event, if asked for;
    None for the first token, which has nothing before it.
    """

    id: int
    tokens: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[Logprob] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: Sequence[Logprob | None] | None = None
