"""Parses the body of an HTTP request into requests for the batcher."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.data import DataError
from megatron.generation.batching.requests import Request, RequestError
from megatron.generation.prompts.chat import ChatTemplate
from megatron.generation.serving.errors import APIError
from megatron.generation.serving.protocol import ChatCompletionRequest, CompletionRequest, parse_body
from megatron.mpu import mix_seed
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed HTTP request.

    requests: the requests for the batcher, in order: `body.n` for each prompt.
    prompt_texts: the text of each prompt if the response repeats the prompts (`echo`), else empty texts.
    """

    body: CompletionRequest | ChatCompletionRequest
    requests: Sequence[Request]
    prompt_texts: Sequence[str]

    def prompt_tokens(self) -> int:
        """Returns the total number of tokens of the prompts. A prompt counts once, whatever `n` is."""
        return sum(len(request.tokens) for request in self.requests[:: self.body.n])


@dataclass(frozen=True)
class RequestParser:
    """Parses the bodies of HTTP requests into requests for the batcher.

    names: the model names that clients can send: the base model's name, then the names of its adapters, by
        their number (`Request.adapter`).
    positions: number of the model's positions. stop_token_ids: the model's token ids that end a text.
    chat: the chat template; None: there is none.
    no_template_reason: why there is no chat template, as a message to clients that send conversations.
    dtype: the model's dtype, by torch's name.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    positions: int
    stop_token_ids: tuple[int, ...]
    chat: ChatTemplate | None
    no_template_reason: str = ""
    dtype: str = "float32"

    def completion(self, content: bytes) -> ParsedRequest:
        """Parses the body of a request to `/v1/completions`. Raises APIError if the body is invalid."""
        body = parse_body(CompletionRequest, content)
        self._check_model(body.model)
        if body.max_tokens == 0 and not body.echo:
            raise APIError(400, "max_tokens: 0 is allowed only with echo: true", param="max_tokens")
        self._check_ids("prompt", (token for ids in body.prompt if not isinstance(ids, str) for token in ids))
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        tokenized = iter(self.tokenizer.tokenize_batch(texts))
        prompts = [next(tokenized) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        prompt_texts = [""] * len(prompts)
        if body.echo:
            prompt_texts = [p if isinstance(p, str) else self.tokenizer.detokenize(p) for p in body.prompt]
        prompt_logprobs = body.echo and (body.logprobs is not None or body.max_tokens == 0)
        return self._parsed(body, prompts, prompt_texts, body.logprobs, prompt_logprobs, self.stop_token_ids)

    def chat_completion(self, content: bytes) -> ParsedRequest:
        """Parses the body of a request to `/v1/chat/completions`. Raises APIError if the body is invalid."""
        body = parse_body(ChatCompletionRequest, content)
        self._check_model(body.model)
        if self.chat is None:
            raise APIError(400, f"{self.no_template_reason}; use /v1/completions", code="no_chat_template")
        try:
            prompt = self.chat.tokens(body.messages, body.settings)
        except (RequestError, DataError) as problem:
            raise APIError(400, f"messages: {problem}", param="messages") from None
        count = body.top_logprobs if body.logprobs else None
        return self._parsed(body, [prompt], [""], count, False, (*self.stop_token_ids, *self.chat.stop_token_ids))

    def _parsed(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        prompts: Sequence[Sequence[int]],
        prompt_texts: Sequence[str],
        logprobs: int | None,
        prompt_logprobs: bool,
        stop_token_ids: tuple[int, ...],
    ) -> ParsedRequest:
        seed = body.seed if body.seed is not None else secrets.randbits(62)
        self._check_ids("logit_bias", body.logit_bias)
        self._check_ids("stop_token_ids", body.stop_token_ids)
        ends = (*(() if body.ignore_eos else stop_token_ids), *body.stop_token_ids)
        sampling = body.sampling_params()
        requests: list[Request] = []
        for prompt in prompts:
            tokens = list(prompt) or [self.tokenizer.eod]  # an empty prompt begins a document
            maximum = self._completion_tokens(len(tokens), body)
            for _ in range(body.n):
                requests.append(
                    Request(
                        tokens,
                        sampling,
                        maximum,
                        mix_seed(seed, "sample", len(requests)),
                        tuple(body.stop),
                        ends,
                        logprobs,
                        prompt_logprobs,
                        minimum_tokens=body.min_tokens,
                        adapter=self.names.index(body.model),
                        processed_logprobs=body.logprobs_mode == "processed_logprobs",
                    )
                )
        return ParsedRequest(body, requests, prompt_texts)

    def _completion_tokens(self, length: int, body: CompletionRequest | ChatCompletionRequest) -> int:
        """Returns the most tokens that may be generated after a prompt of `length` tokens.

        Raises APIError if the prompt and the requested tokens exceed the model's positions, or if
        `min_tokens` is above this limit.
        """
        room = self.positions - length
        limit = room if body.completion_limit is None else body.completion_limit
        if limit > room or room < 1 and body.completion_limit is None:
            requested = "" if body.completion_limit is None else f", and {body.completion_limit} new ones are requested"
            raise APIError(
                400,
                f"the model has {self.positions} positions; the prompt has {length} tokens{requested}. Shorten it"
                + ("" if body.completion_limit is None else " or request fewer new tokens"),
                param="messages" if isinstance(body, ChatCompletionRequest) else "prompt",
                code="context_length_exceeded",
            )
        if body.min_tokens > limit:
            raise APIError(
                400,
                f"min_tokens: {body.min_tokens} is more than the {limit} tokens that this answer may have",
                param="min_tokens",
            )
        return limit

    def _check_ids(self, name: str, tokens: Iterable[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self.tokenizer.vocab_size), None)
        if wrong is not None:
            last = self.tokenizer.vocab_size - 1
            raise APIError(400, f"{name}: {wrong} is not a token id; token ids are 0 to {last}", param=name)

    def _check_model(self, name: str) -> None:
        if name not in self.names:
            raise APIError(404, self.no_model(name), param="model", code="model_not_found")

    def no_model(self, name: str) -> str:
        """Returns the error message for a client that requests the unknown model `name`."""
        return f"there is no model {name!r} here; use {' or '.join(map(repr, self.names))}"
