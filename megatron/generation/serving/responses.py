"""Converts events of the batcher to responses of OpenAI's API, either complete or as streamed chunks."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from megatron.generation.batching.requests import Event, Logprob
from megatron.generation.serving.protocol import ChatCompletionRequest, CompletionRequest
from megatron.generation.serving.request_parsing import ParsedRequest
from megatron.process.run_files import to_json
from megatron.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # OpenAI's number in place of -inf, which JSON cannot express
SSE_DONE = b"data: [DONE]\n\n"


def sse_event(content: dict[str, Any]) -> bytes:
    """Returns `content` as a server-sent event whose data is JSON."""
    return b"data: " + to_json(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class TokenTexts:
    """Maps a token id to the text that the token adds inside a longer text, and a special token's id to its
    name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.context = tokenizer.tokenize("a")[-1:]  # the first token of a text may lose its blank
        self.context_length = len(tokenizer.detokenize(self.context))
        self.texts: dict[int, str] = dict(tokenizer.special_tokens)

    def __getitem__(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = self.tokenizer.detokenize([*self.context, token])[self.context_length :]
        return self.texts[token]


@dataclass
class _Choice:
    """The output of one choice (one of the generated texts of a response) since the choice's last chunk.

    is_started: whether a chunk of the choice was sent already.
    offset: number of characters of the choice before this output, for `text_offset`.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    is_started: bool = False
    offset: int = 0


class ResponseBuilder:
    """Builds the response to one HTTP request from events.

    Pass each event to `add`. Without streaming, `response` then returns the full body. With streaming, call
    `chunk` after each event; it returns the output since the last chunk.
    """

    prefix = ""  # of response ids
    objects = ("", "")  # the field `object` of the response and of its chunks

    def __init__(self, parsed: ParsedRequest, texts: TokenTexts) -> None:
        self.parsed, self.texts = parsed, texts
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.choices = [_Choice() for _ in parsed.requests]
        self.completion_tokens = 0

    def add(self, index: int, event: Event) -> None:
        """Adds the output of an event to the choice with this index."""
        choice = self.choices[index]
        choice.text += event.text
        choice.tokens += event.tokens
        choice.logprobs += event.logprobs
        choice.finish_reason = event.finish_reason
        self.completion_tokens += len(event.tokens)

    def response(self) -> dict[str, Any]:
        """Returns the full body of a response that is not streamed."""
        choices = [self._choice(i, choice, streamed=False) for i, choice in enumerate(self.choices)]
        return {**self._head(self.objects[0]), "choices": choices, "usage": self.usage()}

    def chunk(self, index: int) -> dict[str, Any] | None:
        """Returns a streamed chunk with the output of a choice since its last chunk. Returns None if there is
        no output that a client would see.

        index: index of the choice.
        """
        choice = self.choices[index]
        visible = choice.text or choice.logprobs or choice.finish_reason
        if not (visible or (choice.tokens and self.parsed.body.return_token_ids)):
            return None
        delta = self._choice(index, choice, streamed=True)
        self.choices[index] = _Choice(is_started=True, offset=choice.offset)
        usage = {"usage": None} if self.parsed.body.stream_options.include_usage else {}
        return {**self._head(self.objects[1]), "choices": [delta], **usage}

    def usage_chunk(self) -> dict[str, Any] | None:
        """Returns the last chunk of a stream, which holds token counts; None unless the request sets
        `stream_options.include_usage`."""
        if not self.parsed.body.stream_options.include_usage:
            return None
        return {**self._head(self.objects[1]), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Returns the numbers of prompt tokens, generated tokens and both, under OpenAI's names."""
        prompt = self.parsed.prompt_tokens()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }

    def content(self, index: int, choice: _Choice, streamed: bool) -> dict[str, Any]:
        """Returns the field that holds the text of a choice. streamed: whether the choice is part of a
        streamed chunk."""
        raise NotImplementedError

    def logprobs(self, index: int, choice: _Choice) -> dict[str, Any] | None:
        """Returns the field `logprobs` of a choice; None if log-probabilities were not requested."""
        raise NotImplementedError

    def _choice(self, index: int, choice: _Choice, streamed: bool) -> dict[str, Any]:
        return {
            "index": index,
            **self.content(index, choice, streamed),
            "logprobs": self.logprobs(index, choice),
            "finish_reason": choice.finish_reason,
            **self._token_ids(index, choice),
        }

    def _token_ids(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Returns the field `token_ids` of a choice, and in the choice's first chunk `prompt_token_ids` too.
        Returns {} unless the request sets `return_token_ids`."""
        if not self.parsed.body.return_token_ids:
            return {}
        prompt = {} if choice.is_started else {"prompt_token_ids": list(self.parsed.requests[index].tokens)}
        return {**prompt, "token_ids": choice.tokens}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.parsed.body.model}


class CompletionResponseBuilder(ResponseBuilder):
    prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, parsed: ParsedRequest, texts: TokenTexts) -> None:
        super().__init__(parsed, texts)
        assert isinstance(parsed.body, CompletionRequest)
        self.echo, self.count = parsed.body.echo, parsed.body.logprobs

    def add(self, index: int, event: Event) -> None:
        if self.echo and event.prompt_logprobs is not None:
            self.choices[index].logprobs += event.prompt_logprobs
        super().add(index, event)

    def content(self, index: int, choice: _Choice, streamed: bool) -> dict[str, Any]:
        prompt = self.parsed.prompt_texts[index // self.parsed.body.n] if self.echo and not choice.is_started else ""
        return {"text": prompt + choice.text}

    def logprobs(self, index: int, choice: _Choice) -> dict[str, Any] | None:
        if self.count is None:
            return None
        tokens, values, tops, offsets = [], [], [], []
        for token_logprob in choice.logprobs:
            # The first token of a prompt has no log-probability, because no token is before it.
            token = self.parsed.requests[index].tokens[0] if token_logprob is None else token_logprob.token
            tokens.append(self.texts[token])
            values.append(None if token_logprob is None else max(token_logprob.logprob, _LOWEST_LOGPROB))
            tops.append(self._top(token_logprob))
            offsets.append(choice.offset)
            choice.offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self.count else None,
            "text_offset": offsets,
        }

    def _top(self, chosen: Logprob | None) -> dict[str, float] | None:
        """Returns {token text: log-probability} for the most likely tokens and the chosen token. If several
        tokens have the same text, the most likely one counts."""
        if chosen is None:
            return None
        logprobs: dict[str, float] = {}
        for token, logprob in (*chosen.top, (chosen.token, chosen.logprob)):
            logprobs.setdefault(self.texts[token], max(logprob, _LOWEST_LOGPROB))
        return logprobs


class ChatResponseBuilder(ResponseBuilder):
    prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, parsed: ParsedRequest, texts: TokenTexts) -> None:
        super().__init__(parsed, texts)
        assert isinstance(parsed.body, ChatCompletionRequest)
        self.with_logprobs, self.count = parsed.body.logprobs, parsed.body.top_logprobs

    def content(self, index: int, choice: _Choice, streamed: bool) -> dict[str, Any]:
        if streamed:
            role = {} if choice.is_started else {"role": "assistant"}
            return {"delta": {**role, "content": choice.text}}
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def logprobs(self, index: int, choice: _Choice) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [self._token_logprob(logprob) for logprob in choice.logprobs if logprob is not None]
        return {"content": content, "refusal": None}

    def _token_logprob(self, chosen: Logprob) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in chosen.top[: self.count]]
        return {**self._entry(chosen.token, chosen.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Returns {"token": text, "logprob": value, "bytes": UTF-8 bytes of the text} for a token. `bytes` is
        null if the text does not consist of complete characters."""
        text = self.texts[token]
        utf8 = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": utf8}
