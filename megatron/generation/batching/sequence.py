"""A request while it is being served: its tokens so far, and what the KV cache holds of them."""

import random

from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.generation.batching.detokenize import IncrementalDetokenizer
from megatron.generation.batching.requests import Logprob, Request, RequestError
from megatron.model import Model


class SequenceState:
    """The state of one request between steps. Only its last column in a forward gives a new token."""

    def __init__(
        self, id: int, request: Request, model: Model, longest_cached: int | None, longest_short: int | None
    ) -> None:
        """longest_cached: tokens of the longest text that may use the cache, None: any. Longer ones have
        rotary frequencies of their own (dynamic NTK), and keys in a cache would keep those of a shorter
        text. longest_short: tokens up to which texts have one set of frequencies, and beyond which another
        (LongRoPE); None: all have the same."""
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
        # How many most likely tokens are reported; None: no log-probabilities.
        self.top = request.logprobs if request.logprobs is not None else 0 if request.prompt_logprobs else None
        self.prompt_logprobs: list[Logprob | None] | None = [None] if request.prompt_logprobs else None
        self.cached = not model.args.recompute and (longest_cached is None or self.longest <= longest_cached)
        self.paged = self.cached and model.args.attends  # keys and values take blocks
        self.has_state = self.cached and bool(model.args.mamba_blocks)
        self.blocks: list[int] = []
        self.state_slot: int | None = None  # where its states stand in the cache, while it runs
        self.computed = 0  # tokens whose keys and values, or states, are in the cache
        self.longest_short = longest_short
        # Blocks given to `BlockAllocator.register`, and the last one's id
        self.registered, self.prefix_id = 0, self.first_prefix_id
        self.last_column = -1  # of its row in the current forward

    @property
    def is_long(self) -> bool:
        """Whether its tokens have the frequencies of texts beyond `longest_short`."""
        return self.longest_short is not None and len(self.tokens) > self.longest_short

    @property
    def first_prefix_id(self) -> int:
        """What its blocks are registered behind: keys and values are other ones under other adapters, and
        with other rotary frequencies."""
        return -2 * self.request.adapter - self.is_long

    @property
    def shares_blocks(self) -> bool:
        """Whether texts that begin alike may share its blocks: a state belongs to one text, and is there of
        its last token alone."""
        return self.paged and not self.has_state

    @property
    def decodes(self) -> bool:
        """Whether its last token alone is to be run, behind what the cache holds of it. States are made by a
        text's beginning, also where this is a single token."""
        return self.cached and self.computed == len(self.tokens) - 1 and (self.computed > 0 or not self.has_state)

    @property
    def beginning(self) -> tuple[int, ...]:
        """What requests have in common that can share their first block."""
        return (self.first_prefix_id, *self.tokens[:BLOCK_SIZE])

    @property
    def longest(self) -> int:
        """Tokens that are run at most: all but the last one."""
        return self.prompt_length + max(self.request.maximum_tokens - 1, 0)

    @property
    def scoring_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length


def check_request(sequence: SequenceState, model: Model, cache_blocks: int) -> None:
    """Raise RequestError for an empty prompt, for tokens that do not exist, for values that contradict each
    other, and where prompt and maximum_tokens fit neither the model's positions nor a cache of so many
    blocks."""
    request, vocab, positions = sequence.request, model.tokenizer.vocab_size, model.positions
    if not request.tokens:
        raise RequestError("the prompt is empty: it needs a token at least, as the one that begins a document")
    if min(request.tokens) < 0 or max(request.tokens) >= vocab:
        raise RequestError(f"the prompt has tokens that do not exist: they go from 0 to {vocab - 1}")
    if request.maximum_tokens < (0 if request.prompt_logprobs else 1):
        raise RequestError(f"maximum_tokens is {request.maximum_tokens}: nothing is asked for")
    if request.minimum_tokens > request.maximum_tokens:
        raise RequestError(f"minimum_tokens is {request.minimum_tokens} and maximum_tokens is {request.maximum_tokens}")
    if not all(0 <= token < vocab for token, _ in request.sampling.logit_bias):
        raise RequestError(f"logit_bias has tokens that do not exist: they go from 0 to {vocab - 1}")
    if request.logprobs is not None and not 0 <= request.logprobs <= vocab:
        raise RequestError(f"logprobs is {request.logprobs}: expected 0 to {vocab}")
    if request.stop and not request.text:
        raise RequestError("stop strings are looked for in the text, and text is False")
    if sequence.longest > positions:
        raise RequestError(
            f"the prompt has {sequence.prompt_length} tokens and maximum_tokens is {request.maximum_tokens}; the model "
            f"has {positions} positions, and all tokens but the last one take one"
        )
    if sequence.paged and -(-sequence.longest // BLOCK_SIZE) > cache_blocks:
        raise RequestError(
            f"the prompt has {sequence.prompt_length} tokens and maximum_tokens is {request.maximum_tokens}; the whole "
            f"cache holds {cache_blocks * BLOCK_SIZE} (kv_cache_gb)"
        )
