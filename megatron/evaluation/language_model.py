"""Defines NeoXLM, through which lm-eval, in a thread of rank 0, uses our model.

It tokenizes, truncates and scores requests by the rules of lm-eval's `hf` backend.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.distributed.rank0_driver import RunOperation
from megatron.evaluation.progress import EvaluationProgress
from megatron.generation.batching.requests import Request, RequestError
from megatron.generation.prompts.chat import ChatTemplate
from megatron.generation.sampling import SamplingParams
from megatron.model import Model
from megatron.mpu import mix_seed
from megatron.neox_arguments import ConfigError
from megatron.process import look_for_stop

MAXIMUM_TOKENS = 256  # most tokens of an answer if the task sets no limit
_FIRST_PART, _SECONDS_A_PART = 64, 10.0  # requests per data rank in the first chunk; intended seconds per chunk
# The generation_kwargs of a task that are accepted
_ACCEPTED = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}

TokenizedRequest = tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]


class NeoXLM(TemplateLM):
    """Implements lm-eval's `LM` class for our model, by running lm-eval's requests on all ranks.

    It calls `call("score", requests)` and `call("generate", requests)`. Requests run in chunks; after each
    chunk its answers are passed to lm-eval's cache (`cache_hook`).

    num_too_long: how many requests so far had more tokens than the model has positions.
    num_skipped: how many of the requests that were too long were not run (`eval_overlong: skip`).
    """

    def __init__(
        self, model: Model, call: RunOperation, progress: EvaluationProgress, template: ChatTemplate | None = None
    ) -> None:
        super().__init__()
        self.model, self.call, self.progress, self.template = model, call, progress, template
        self.num_too_long = self.num_skipped = 0
        self._tokenizer = model.tokenizer
        self._token_cache: dict[str, list[int]] = {}  # token ids of the texts of the current requests

    # -- what lm-eval asks about the model -------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.eos if self._tokenizer.bos is None else self._tokenizer.bos

    @property
    def max_length(self) -> int:
        return self.model.positions

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.template.text if chat_template and self.template is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert self.template is not None
        options: Any = {"generation_prompt": add_generation_prompt, "open_end": not add_generation_prompt}
        try:
            return self.template.render(chat_history, **options)
        except RequestError:  # some templates reject system messages; the hf backend drops them too
            messages = [message for message in chat_history if message["role"] != "system"]
            return self.template.render(messages, **options)

    # -- tokens ----------------------------------------------------------------------------------------------

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the token ids of a text. They equal those of lm-eval's hf backend.

        add_special_tokens: whether the tokenizer adds its special tokens; None: it adds them unless the text
            begins with the text of the BOS token.
        """
        if add_special_tokens is False or (add_special_tokens is None and self._begins(string)):
            return self._tokenizer.tokenize_bare(string)
        tokens = self._token_cache.get(string)
        return list(tokens) if tokens is not None else self._tokenizer.tokenize(string)

    def _begins(self, string: str) -> bool:
        name = self._tokenizer.special_tokens.get(self.prefix_token_id, "")
        return bool(name) and string.startswith(name)

    @contextmanager
    def _tokenized(self, strings: Iterator[str]) -> Iterator[None]:
        """Tokenizes `strings` in one batch and keeps their token ids for `tok_encode` during the `with`
        block."""
        texts = list(dict.fromkeys(strings))
        self._token_cache = dict(zip(texts, self._tokenizer.tokenize_batch(texts), strict=True))
        try:
            yield
        finally:
            self._token_cache = {}

    # -- log-likelihoods -------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        for request in requests:
            if request.args == ("", ""):
                place = f"{request.task_name}: document {request.doc_id}"
                raise ValueError(
                    f"{place} has an empty question and an empty choice, so nothing can be scored; remove this document"
                )
        pairs = [request.args for request in requests if request.args[0]]
        texts = (text for context, continuation in pairs for text in (context + continuation, context.rstrip()))
        with self._tokenized(texts):
            return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[TokenizedRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        self.progress.expect(len(requests))
        tokens = [
            (tuple(context) or (self.prefix_token_id,), tuple(continuation)) for _, context, continuation in requests
        ]
        for part in self._parts(_longest_first(tokens)):
            scores = self.call("score", [tokens[i] for i in part])
            for i, scored in zip(part, scores, strict=True):
                answers[i] = (sum(scored.logprobs), all(scored.greedy))
                self.num_too_long += bool(scored.truncated or scored.skipped)
                self.num_skipped += scored.skipped
                texts = requests[i][0]
                if texts is not None and not scored.skipped:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[i])
        return [answers[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        texts = [request.args[0] for request in requests]
        windows: list[TokenizedRequest] = []
        owners: list[int] = []
        with self._tokenized(iter(texts)):
            for owner, text in enumerate(texts):
                text_windows = get_rolling_token_windows(
                    token_list=self.tok_encode(text), prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length, context_len=1,
                )  # fmt: skip
                windows += [(None, *make_disjoint_window(window)) for window in text_windows]
                owners += [owner] * (len(windows) - len(owners))
        totals = [0.0] * len(texts)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    # -- text ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        with self._tokenized(request.args[0] for request in requests):
            generation_requests = [self._request(i, *request.args) for i, request in enumerate(requests)]
        runnable = {i: request for i, request in enumerate(generation_requests) if request is not None}
        answers = {i: "" for i in range(len(generation_requests)) if i not in runnable}
        self.progress.expect(len(runnable))
        order = sorted(runnable, key=lambda i: -len(runnable[i].tokens))
        for part in self._parts([[i] for i in order]):
            for i, text in zip(part, self.call("generate", [runnable[i] for i in part]), strict=True):
                answers[i] = postprocess_generated_text(text, list(runnable[i].stop), None)
                self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
        return [answers[i] for i in range(len(requests))]

    def _request(self, number: int, context: str, gen_kwargs: dict[str, Any]) -> Request | None:
        """Converts lm-eval's request for generated text to a `Request` of the batcher.

        Returns None for a prompt that is too long if `eval_overlong` is `skip`. Raises ConfigError for such a
        prompt if it is `refuse`, and ValueError for unsupported gen_kwargs.

        number: the request's index, on which its seed depends. context: the prompt. gen_kwargs: the task's
            settings for generation.
        """
        kwargs = dict(normalize_gen_kwargs(gen_kwargs, MAXIMUM_TOKENS))
        unknown = sorted(name for name in kwargs if name not in _ACCEPTED)
        if unknown:
            raise ValueError(f"generation_kwargs: {', '.join(unknown)}: not supported; remove from the task file")
        maximum = int(kwargs["max_gen_toks"])
        room = self.max_length - maximum
        if room < 1:
            raise ValueError(
                f"max_gen_toks: an answer of {maximum} tokens leaves no room for a question in the model's "
                f"{self.max_length} positions; lower max_gen_toks in the task file"
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        if len(tokens) > room:
            self.num_too_long += 1
            if self.model.args.eval_overlong == "refuse":
                raise ConfigError(
                    [
                        f"eval_overlong: refuse: question {number} has {len(tokens)} tokens, but an answer of "
                        f"{maximum} leaves only {room} of the model's {self.max_length} positions for it; set "
                        "eval_overlong to truncate_left or skip"
                    ]
                )
            if self.model.args.eval_overlong == "skip":
                self.num_skipped += 1
                return None
        penalty = float(kwargs.get("repetition_penalty") or 1.0)
        sampling = SamplingParams(repetition_penalty=penalty)
        if kwargs.get("do_sample"):
            settings = {name: kwargs[name] for name in ("top_k", "top_p", "min_p") if kwargs.get(name) is not None}
            sampling = replace(sampling, temperature=float(kwargs.get("temperature") or 1.0), **settings)
        return Request(
            tokens=tuple(tokens[-room:]),
            sampling=sampling,
            maximum_tokens=maximum,
            seed=mix_seed(self.model.args.seed, "evaluation", number),
            stop=tuple(text for text in kwargs["until"] if text),
            stop_token_ids=(*self.model.stop_token_ids, self._tokenizer.eos),
        )

    # -- chunks of requests ----------------------------------------------------------------------------------

    def _parts(self, groups: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields lists of request numbers, each of a size that should take about 10 seconds to run.

        When the caller takes the next list, the last one is added to the progress. Raises StopRequested after
        a stop signal.

        groups: lists of request numbers; the numbers of one group are yielded in one list.
        """
        size, start = _FIRST_PART * self.model.groups.size("data"), 0
        while start < len(groups):
            part: list[int] = []
            while start < len(groups) and len(part) < size:
                part += groups[start]
                start += 1
            look_for_stop()
            start_time = time.perf_counter()
            yield part
            self.progress.update(len(part))
            seconds = time.perf_counter() - start_time
            size = int(len(part) * min(4.0, max(0.25, _SECONDS_A_PART / max(seconds, 1e-3)))) + 1


def _longest_first(tokens: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """Groups requests by context, and returns a list of request numbers for each context, longest texts
    first.

    tokens: (context, continuation) of each request.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(tokens):
        groups.setdefault(tuple(context), []).append(i)
    longest = {context: max(len(tokens[i][1]) for i in numbers) for context, numbers in groups.items()}
    return sorted(groups.values(), key=lambda group: -len(tokens[group[0]][0]) - longest[tuple(tokens[group[0]][0])])
