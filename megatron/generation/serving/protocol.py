"""Parses the bodies of requests: the supported fields of OpenAI's API, and a few of vLLM's.

An unsupported field is an error, except a few known fields that do not change the answer, which are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megatron.data.conversations import Message, TemplateSettings, conversation, template_settings
from megatron.data.conversations.messages import REASONING
from megatron.generation.sampling import SamplingParams
from megatron.generation.serving.errors import APIError

MAX_STOP_STRINGS = 16
# Fields that are accepted and ignored, because they do not change the answer.
_HARMLESS = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
_MESSAGE_FIELDS = {"role", "content", "name", "tool_call_id", "tool_calls", "weight", *REASONING}
# Unsupported fields that can change the answer, with the values that do not, which are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """Returns the field `prompt` of a request as a list of prompts, each a text or a list of token ids.
    Raises ValueError for any other value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if _is_ids(value):
            return [value]
        if all(isinstance(item, list) and item and _is_ids(item) for item in value):
            return list(value)
    raise ValueError("expected a text, a list of texts, a list of token ids, or a list of such lists; no empty list")


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _messages(value: Any) -> list[Message]:
    """Parses the messages of a request, by the rules for conversations in training data. Raises ValueError
    for invalid messages and for unsupported fields."""
    messages = conversation(value, "messages")
    for number, message in enumerate(messages):
        unknown = message.keys() - _MESSAGE_FIELDS
        if unknown:
            raise ValueError(f"message {number}: unsupported fields: {', '.join(sorted(unknown))}; leave them out")
    return messages


class _StrictModel(BaseModel):
    """A pydantic model that does not convert types (`"1"` is not a number). A field that is null counts as
    not sent."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(_StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, but events are not padded


class _SamplingRequest(_StrictModel):
    """The fields that requests for completions and for chat completions have in common.

    They are OpenAI's, except top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids and
    return_token_ids, which are fields of vLLM, and logprobs_mode, which is an option of vLLM's server.
    """

    model: str
    n: int = Field(1, ge=1, le=128)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = Field(
        [], max_length=MAX_STOP_STRINGS
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] = {}
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[int] = []
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    return_token_ids: bool = False

    def sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the request sets. With `top_p: 0` the most likely token is
        chosen, as in OpenAI's API."""
        return SamplingParams(
            temperature=self.temperature if self.top_p > 0 else 0.0,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=tuple(self.logit_bias.items()),
        )


class CompletionRequest(_SamplingRequest):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def completion_limit(self) -> int:
        """The most tokens to generate."""
        return self.max_tokens


class ChatCompletionRequest(_SamplingRequest):
    messages: Annotated[list[Message], BeforeValidator(_messages)]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def completion_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the model's positions leave after the prompt."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def settings(self) -> TemplateSettings:
        """The request's tools and `chat_template_kwargs`, which are passed to the chat template. Raises
        DataError for invalid tools."""
        return template_settings({"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs})


B = TypeVar("B", bound=_SamplingRequest)


def parse_body(kind: type[B], content: bytes) -> B:
    """Parses and checks the JSON body of a request. Raises APIError, which names the field that is invalid or
    not supported.

    kind: the class of the returned object.
    """
    try:
        body = kind.model_validate_json(content)
    except ValidationError as problem:
        raise _first_error(problem) from None
    for name, value in (body.model_extra or {}).items():
        if name in _HARMLESS or value in _NEUTRAL.get(name, ()):
            continue
        raise APIError(
            400, f"{name}: not supported by this server; leave it out", param=name, code="unsupported_parameter"
        )
    if isinstance(body, ChatCompletionRequest):
        if body.top_logprobs and not body.logprobs:
            raise APIError(
                400, "top_logprobs: needs logprobs: true; set it, or leave out top_logprobs", param="top_logprobs"
            )
        if body.tools and body.tool_choice != "none":
            raise APIError(
                400,
                "tools: this server does not parse tool calls; send tool_choice: none: then the model sees the tools, "
                "and its calls are text of the answer",
                param="tools",
                code="unsupported_parameter",
            )
    if body.stream_options.include_usage and not body.stream:
        raise APIError(400, "stream_options: include_usage needs stream: true", param="stream_options")
    return body


def _first_error(problem: ValidationError) -> APIError:
    """Returns the first error in pydantic's ValidationError as an APIError. It names the field, unless the
    body is no JSON object."""
    error = problem.errors(include_url=False, include_input=False)[0]
    if error["type"] == "json_invalid" or not error["loc"]:
        return APIError(400, f"the body is not a JSON object: {error['msg']}", code="invalid_json")
    place = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        message = "is required"
    return APIError(400, f"{place}: {message}", param=str(error["loc"][0]))
