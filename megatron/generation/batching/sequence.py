"""Holds the state of a request while it is served: its tokens so far, and which of them are in the KV
cache."""

import random
from collections.abc import Callable, Sequence

from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.generation.batching.requests import Logprob, Request, RequestError
from megatron.model import Model

_HALF = "\N{REPLACEMENT CHARACTER}"  # the decoded text of an incomplete character


class SequenceState:
    """The state of one request between steps: its tokens, its KV-cache blocks, and how many tokens are
    computed."""

    def __init__(
        self, id: int, request: Request, model: Model, longest_cached: int | None, longest_short: int | None
    ) -> None:
        """Starts with the tokens of the prompt and no KV-cache blocks.

        longest_cached: most tokens of a text that may use the KV cache; None: any length. In longer texts the
            rotary frequencies change with the length (dynamic NTK), so cached keys would be wrong.
        longest_short: texts up to this length use one set of rotary frequencies, longer texts another set
            (LongRoPE); None: all texts use the same.
        """
        self.id, self.request = id, request
        self.tokens = list(request.tokens)
        self.prompt_length = len(self.tokens)
        self.stop_token_ids = frozenset(
            model.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        )
        self.rng = random.Random(request.seed) if request.sampling.temperature > 0.0 else None
        self.detokenizer = None
        if request.text:
            self.detokenizer = IncrementalDetokenizer(model.tokenizer.detokenize, request.stop, request.minimum_tokens)
        # Number of most likely tokens to report; None: no log-probabilities.
        self.top = request.logprobs if request.logprobs is not None else 0 if request.prompt_logprobs else None
        self.prompt_logprobs: list[Logprob | None] | None = [None] if request.prompt_logprobs else None
        self.cached = not model.args.recompute and (longest_cached is None or self.longest <= longest_cached)
        self.paged = self.cached and model.args.attends  # keys and values take blocks
        self.has_state = self.cached and bool(model.args.state_blocks)
        self.blocks: list[int] = []
        self.state_slot: int | None = None  # index of its Mamba states in the cache, while it runs
        self.computed = 0  # tokens whose keys and values, or states, are in the cache
        self.longest_short = longest_short
        # Number of blocks passed to `BlockAllocator.register`, and the prefix id of the last one
        self.registered, self.prefix_id = 0, self.first_prefix_id
        self.count = 0  # tokens that the current forward computes

    @property
    def is_long(self) -> bool:
        """Whether the text is longer than `longest_short`, and so uses LongRoPE's frequencies for long
        texts."""
        return self.longest_short is not None and len(self.tokens) > self.longest_short

    @property
    def first_prefix_id(self) -> int:
        """The `root_id` that this request passes to `BlockAllocator.share_prefix`.

        It differs for each adapter and for short and long texts (`is_long`), because their keys and values
        differ.
        """
        return -2 * self.request.adapter - self.is_long

    @property
    def shares_blocks(self) -> bool:
        """Whether requests with the same prefix may share this request's KV-cache blocks. False for models
        with Mamba states, because those are kept only for the last token of a text."""
        return self.paged and not self.has_state

    @property
    def decodes(self) -> bool:
        """Whether only the last token is still to be computed, with the earlier tokens in the cache. False
        for the first token of a text with Mamba states, because a prefill must create the states."""
        return self.cached and self.computed == len(self.tokens) - 1 and (self.computed > 0 or not self.has_state)

    @property
    def beginning(self) -> tuple[int, ...]:
        """A key that is equal for all requests that can share their first KV-cache block."""
        return (self.first_prefix_id, *self.tokens[:BLOCK_SIZE])

    @property
    def longest(self) -> int:
        """The most tokens that this request may run through the model: the prompt and all generated tokens
        but the last."""
        return self.prompt_length + max(self.request.maximum_tokens - 1, 0)

    @property
    def scoring_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length


def check_request(sequence: SequenceState, model: Model, cache_blocks: int) -> None:
    """Raises RequestError if a request cannot be served.

    It cannot be served if its prompt is empty, if a token id or another value is out of range, or if its
    prompt and `maximum_tokens` exceed the model's positions or the KV cache of `cache_blocks` blocks.
    """
    request, vocab, positions = sequence.request, model.tokenizer.vocab_size, model.positions
    if not request.tokens:
        raise RequestError("the prompt is empty: give at least one token, such as the one that begins a document")
    if min(request.tokens) < 0 or max(request.tokens) >= vocab:
        raise RequestError(f"the prompt has token ids that do not exist: use 0 to {vocab - 1}")
    if request.maximum_tokens < (0 if request.prompt_logprobs else 1):
        raise RequestError(f"maximum_tokens is {request.maximum_tokens}: set it to 1 or more")
    if request.minimum_tokens > request.maximum_tokens:
        raise RequestError(
            f"minimum_tokens {request.minimum_tokens} is above maximum_tokens {request.maximum_tokens}; lower "
            "minimum_tokens"
        )
    if not all(0 <= token < vocab for token, _ in request.sampling.logit_bias):
        raise RequestError(f"logit_bias has token ids that do not exist: use 0 to {vocab - 1}")
    if request.logprobs is not None and not 0 <= request.logprobs <= vocab:
        raise RequestError(f"logprobs is {request.logprobs}: set it to a number from 0 to {vocab}")
    if request.stop and not request.text:
        raise RequestError("stop is set but text is False: stop strings are searched for in the text; set text=True")
    if sequence.longest > positions:
        raise RequestError(
            f"the prompt has {sequence.prompt_length} tokens and maximum_tokens is {request.maximum_tokens}; the model "
            f"has {positions} positions, but this needs {sequence.longest}; shorten the prompt or lower maximum_tokens"
        )
    if sequence.paged and -(-sequence.longest // BLOCK_SIZE) > cache_blocks:
        raise RequestError(
            f"the prompt has {sequence.prompt_length} tokens and maximum_tokens is {request.maximum_tokens}, but the "
            f"whole KV cache holds only {cache_blocks * BLOCK_SIZE} tokens; shorten the prompt, lower maximum_tokens, "
            "or set kv_cache_gb higher"
        )


class IncrementalDetokenizer:
    """Converts generated tokens to text piece by piece, and ends the text at a stop string.

    A piece holds only complete characters. Text that may be the beginning of a stop string is held back.
    After a stop string, `stopped` is true.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = (), minimum: int = 0) -> None:
        """Starts with no tokens.

        detokenize: returns the text of token ids.
        stop: strings that end the text and are left out of it.
        minimum: number of tokens before which stop strings are ignored (vLLM's `min_tokens`).
        """
        self.minimum = minimum
        self.detokenize, self.stop = detokenize, [string for string in stop if string]
        self.tokens: list[int] = []
        # The text of tokens[:read] has been returned. New tokens are decoded together with those from
        # `start` on, because the text of a token depends on the tokens before it.
        self.start = self.read = 0
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Adds a token and returns the new text. The text is empty while a character is incomplete or a stop
        string may have begun."""
        self.tokens.append(token)
        text = self.detokenize(self.tokens[self.start :])
        return "" if text.endswith(_HALF) else self._show(text, final=False)

    def finish(self) -> str:
        """Returns the text that was held back, at the end of generation. Incomplete characters become U+FFFD.
        After a stop string it returns ""."""
        return "" if self.stopped else self._show(self.detokenize(self.tokens[self.start :]), final=True)

    def _show(self, text: str, final: bool) -> str:
        new = text[len(self.detokenize(self.tokens[self.start : self.read])) :]
        if new:
            self.start, self.read = self.read, len(self.tokens)
        text, self.held = self.held + new, ""
        counts = len(self.tokens) > self.minimum
        stop_places = [place for string in self.stop if counts and (place := text.find(string)) >= 0]
        if stop_places:
            self.stopped = True
            return text[: min(stop_places)]
        if final or not self.stop:
            return text
        keep = max(_overlap(text, string) for string in self.stop)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `string`."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(string[:length])), 0)
