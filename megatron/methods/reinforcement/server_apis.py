"""Clients of the HTTP APIs of inference servers: tools/serve.py, vLLM and SGLang.

All ask for token ids, and for log-probabilities of the logits divided by the temperature.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.generation.weight_updates import WeightUpdate
from megatron.methods.reinforcement.server_calls import Connection, ServerError
from megatron.neox_arguments.values.integers import finite_float, parse_integer

_FINISHED = {"stop": True, "length": False}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


@dataclass(frozen=True)
class Written:
    """An answer that a server has written.

    weight_version: version of the weights that wrote it; None if the server does not report it.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    weight_version: int | None = None


class ServerAPI:
    """A client of one inference server. Its methods raise ServerError.

    names_weights: whether the server's answers report the version of its weights.
    settings_path: path of the request that shows the server's settings.
    """

    names_weights = True
    settings_path = ""

    def __init__(self, connection: Connection, temperature: float, stop_token_ids: Sequence[int]) -> None:
        """Takes a connection and the sampling parameters. Answers end with one of `stop_token_ids`."""
        self.connection = connection
        self.sampling: dict[str, Any] = {
            "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1,
            "stop_token_ids": list(stop_token_ids),
        }  # fmt: skip

    def check(self) -> None:
        """Checks that the server responds. If requests must name its model, it also looks up the name."""
        raise NotImplementedError

    def precision(self) -> str | None:
        """Returns the server's dtype as `fp32`, `bf16` or `fp16`; None if its settings do not show it."""
        try:
            settings = json.dumps(self.connection.call(self.settings_path))
        except ServerError:
            return None  # an older release, which has no such request
        dtype = re.search(r"(?<!\w)dtype\W+(?:torch\.)?(\w+)", settings)
        return None if dtype is None else _PRECISIONS.get(dtype[1])

    def write(self, prompt: list[int], maximum: int, seed: int) -> Written:
        """Returns the server's answer to the prompt, at most `maximum` tokens."""
        raise NotImplementedError

    def update(self, update: WeightUpdate, url: str | None) -> None:
        """Loads new weights into the server, which then answers later requests with them.

        url: where the server fetches the weights; None: it reads them from the folder `update.path`.
        """
        raise NotImplementedError


class OpenAIServer(ServerAPI):
    """A client of tools/serve.py, by its OpenAI-compatible API."""

    # Request fields that OpenAI's interface does not have
    fields: dict[str, Any] = {"logprobs": 0, "return_token_ids": True, "logprobs_mode": "processed_logprobs"}
    lacks = "needs tools/serve.py of this version"
    settings_path = "/v1/models"

    model = ""

    def check(self) -> None:
        """Checks that the server responds, and finds the name of its model."""
        answer = self.connection.call("/v1/models")
        try:
            self.model = answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise self.connection.error(
                f"GET /v1/models: the reply names no model, so this is no server of a model: {answer!r:.300}"
            ) from None

    def write(self, prompt: list[int], maximum: int, seed: int) -> Written:
        """Returns the server's answer to the prompt, at most `maximum` tokens."""
        request = {"model": self.model, "prompt": prompt, "max_tokens": maximum, "seed": seed}
        answer = self.connection.call("/v1/completions", {**self.sampling, **self.fields, **request})
        try:
            (choice,) = answer["choices"]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            finished, version = _FINISHED[choice["finish_reason"]], answer.get("weight_version")
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise self.connection.error(
                f"POST /v1/completions: no answer with token_ids and logprobs ({problem!r}), which {self.lacks}; the "
                f"reply was {answer!r:.300}"
            ) from None
        return _checked(self.connection, Written(tokens, logprobs, finished, version), maximum)

    def update(self, update: WeightUpdate, url: str | None) -> None:
        """Loads new weights into the server, from `url`, or from the folder `update.path` if it is None."""
        place = {"path": update.path} if url is None else {"url": url}
        body = {**place, "version": update.version, "sha256": dict(update.sha256)}
        answer = self.connection.call("/v1/update_weights", body)
        if not isinstance(answer, dict) or answer.get("weight_version") != update.version:
            raise self.connection.error(
                f"POST /v1/update_weights: the server did not load weight version {update.version}; the reply was "
                f"{answer!r:.300}"
            )


class VLLMServer(OpenAIServer):
    """A client of vLLM, whose answers do not report the version of its weights."""

    names_weights = False

    fields = {"logprobs": 0, "return_token_ids": True}
    lacks = "needs vLLM 0.10.2 or later"
    settings_path = "/server_info"  # with VLLM_SERVER_DEV_MODE=1

    def update(self, update: WeightUpdate, url: str | None) -> None:
        """Loads new weights into vLLM from the folder `update.path`. vLLM must run with
        VLLM_SERVER_DEV_MODE=1."""
        kwargs = {"weights_path": update.path}
        body = {"method": "reload_weights", "kwargs": kwargs, "timeout": self.connection.timeout_s}
        self.connection.call(
            "/collective_rpc",
            body,
            hint_500="may be a vLLM whose reload_weights takes no weights_path; install a later one",
        )
        self.connection.call("/reset_prefix_cache", {})


class SGLangServer(ServerAPI):
    """A client of SGLang, by its native API."""

    settings_path = "/get_server_info"

    def check(self) -> None:
        """Checks that the server responds. Requests to SGLang need no model name."""
        self.connection.call("/v1/models")

    def write(self, prompt: list[int], maximum: int, seed: int) -> Written:
        """Returns the server's answer to the prompt, at most `maximum` tokens."""
        sampling = {**self.sampling, "max_new_tokens": maximum, "sampling_seed": seed % 2**31}
        answer = self.connection.call(
            "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        )
        try:
            meta = answer["meta_info"]
            pairs, finished = meta["output_token_logprobs"], _FINISHED[meta["finish_reason"]["type"]]
            tokens, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
            version = meta.get("weight_version")
        except (KeyError, TypeError, IndexError, AttributeError) as problem:
            raise self.connection.error(
                f"POST /generate: no answer with output_token_logprobs ({problem!r}); the reply was {answer!r:.300}"
            ) from None
        number = parse_integer(version) if isinstance(version, str) else None
        return _checked(self.connection, Written(tokens, logprobs, finished, number), maximum)

    def update(self, update: WeightUpdate, url: str | None) -> None:
        """Loads new weights into SGLang from the folder `update.path`."""
        body = {"model_path": update.path, "weight_version": str(update.version), "flush_cache": True}
        answer = self.connection.call("/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise self.connection.error(
                f"POST /update_weights_from_disk: SGLang did not load the new weights; the reply was {answer!r:.300}"
            )


SERVERS: Mapping[str, type[ServerAPI]] = {"openai": OpenAIServer, "vllm": VLLMServer, "sglang": SGLangServer}
"""The classes of clients, by the value of `rollout.server_api`."""


def _checked(connection: Connection, written: Written, maximum: int) -> Written:
    """Returns the answer if its tokens and log-probabilities are valid; else raises ServerError."""
    tokens, logprobs = written.tokens, written.logprobs
    good = (
        isinstance(tokens, list)
        and isinstance(logprobs, list)
        and 0 < len(tokens) <= maximum
        and len(logprobs) == len(tokens)
        and all(type(token) is int for token in tokens)
        and all((number := finite_float(value)) is not None and number <= 1e-3 for value in logprobs)
    )
    if not good:
        raise connection.error(
            f"expected an answer of 1 to {maximum} token ids with as many log-probabilities, got {tokens!r:.150} and "
            f"{logprobs!r:.150}"
        )
    return written
