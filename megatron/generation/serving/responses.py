"""Events as the answers of OpenAI's API, whole or in pieces."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.generation.batching.requests import Event, Logprob, Request
from megatron.generation.serving.protocol import ChatCompletionRequest, CompletionRequest
from megatron.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; OpenAI's number
END = b"data: [DONE]\n\n"


def sse_event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class TokenTexts:
    """The text of a token alone, as it stands within a text; special tokens by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.before = tokenizer.tokenize("a")[-1:]  # a first token may lose its blank
        self.skip = len(tokenizer.detokenize(self.before))
        self.known: dict[int, str] = dict(tokenizer.special_tokens)

    def __getitem__(self, token: int) -> str:
        if token not in self.known:
            self.known[token] = self.tokenizer.detokenize([*self.before, token])[self.skip :]
        return self.known[token]


@dataclass(frozen=True)
class ParsedRequest:
    """An HTTP request understood. requests: n for each prompt in order; prompts: their texts."""

    body: CompletionRequest | ChatCompletionRequest
    requests: Sequence[Request]
    prompts: Sequence[str]

    def prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests[:: self.body.n])


@dataclass
class _Choice:
    """What of a choice is written. offset: its characters, for `text_offset`."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    begun: bool = False
    offset: int = 0


class ResponseBuilder:
    """The answer to one request. `add` takes events; `whole` is all of them, `piece` what came since the last one."""

    prefix = ""  # of ids
    kinds = ("", "")  # of the object, whole and in pieces

    def __init__(self, asked: ParsedRequest, model: str, texts: TokenTexts) -> None:
        self.asked, self.model, self.texts = asked, model, texts
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.choices = [_Choice() for _ in asked.requests]
        self.completion_tokens = 0

    def add(self, index: int, event: Event) -> None:
        choice = self.choices[index]
        choice.text += event.text
        choice.tokens += event.tokens
        choice.logprobs += event.logprobs
        choice.finish_reason = event.finish_reason
        self.completion_tokens += len(event.tokens)

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(i, choice) for i, choice in enumerate(self.choices)]
        return {**self._head(self.kinds[0]), "choices": choices, "usage": self.usage()}

    def piece(self, index: int) -> dict[str, Any] | None:
        """None when there is nothing to say yet."""
        choice = self.choices[index]
        said = choice.text or choice.logprobs or choice.finish_reason
        if not (said or (choice.tokens and self.asked.body.return_token_ids)):
            return None
        made = self.delta(index, choice)
        self.choices[index] = _Choice(begun=True, offset=choice.offset)
        usage = {"usage": None} if self.asked.body.stream_options.include_usage else {}
        return {**self._head(self.kinds[1]), "choices": [made], **usage}

    def last(self) -> dict[str, Any] | None:
        """The piece after all others, if it was asked for."""
        if not self.asked.body.stream_options.include_usage:
            return None
        return {**self._head(self.kinds[1]), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompt = self.asked.prompt_tokens()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }

    def choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    def ids(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Token ids, where they are asked for; those of the prompt once."""
        if not self.asked.body.return_token_ids:
            return {}
        prompt = {} if choice.begun else {"prompt_token_ids": list(self.asked.requests[index].tokens)}
        return {**prompt, "token_ids": choice.tokens}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class CompletionResponseBuilder(ResponseBuilder):
    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, asked: ParsedRequest, model: str, texts: TokenTexts) -> None:
        super().__init__(asked, model, texts)
        assert isinstance(asked.body, CompletionRequest)
        self.echo, self.count = asked.body.echo, asked.body.logprobs

    def add(self, index: int, event: Event) -> None:
        if self.echo and event.prompt_logprobs is not None:
            self.choices[index].logprobs += event.prompt_logprobs
        super().add(index, event)

    def choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        prompt = self.asked.prompts[index // self.asked.body.n] if self.echo and not choice.begun else ""
        return {
            "index": index,
            "text": prompt + choice.text,
            "logprobs": self._logprobs(index, choice),
            "finish_reason": choice.finish_reason,
            **self.ids(index, choice),
        }

    delta = choice

    def _logprobs(self, index: int, choice: _Choice) -> dict[str, Any] | None:
        if self.count is None:
            return None
        tokens, values, tops, offsets = [], [], [], []
        for one in choice.logprobs:
            token = one.token if one is not None else self.asked.requests[index].tokens[0]  # nothing stands before it
            tokens.append(self.texts[token])
            values.append(None if one is None else max(one.logprob, _LEAST))
            tops.append(self._top(one))
            offsets.append(choice.offset)
            choice.offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self.count else None,
            "text_offset": offsets,
        }

    def _top(self, one: Logprob | None) -> dict[str, float] | None:
        """Texts of the most likely tokens and of the chosen one; of tokens of the same text the most likely."""
        if one is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            found.setdefault(self.texts[token], max(logprob, _LEAST))
        return found


class ChatResponseBuilder(ResponseBuilder):
    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, asked: ParsedRequest, model: str, texts: TokenTexts) -> None:
        super().__init__(asked, model, texts)
        assert isinstance(asked.body, ChatCompletionRequest)
        self.wanted, self.count = asked.body.logprobs, asked.body.top_logprobs

    def choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(index, choice)}

    def delta(self, index: int, choice: _Choice) -> dict[str, Any]:
        role = {} if choice.begun else {"role": "assistant"}
        return {"index": index, "delta": {**role, "content": choice.text}, **self._rest(index, choice)}

    def _rest(self, index: int, choice: _Choice) -> dict[str, Any]:
        content = [self._one(one) for one in choice.logprobs if one is not None]
        return {
            "logprobs": {"content": content, "refusal": None} if self.wanted else None,
            "finish_reason": choice.finish_reason,
            **self.ids(index, choice),
        }

    def _one(self, one: Logprob) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in one.top[: self.count]]
        return {**self._entry(one.token, one.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """bytes: null for a token that is no whole character."""
        text = self.texts[token]
        whole = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": whole}
