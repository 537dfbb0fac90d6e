"""Conversations between the model and environments (`rollout.environment`), turn by turn.

A row holds the tokens of both sides of a conversation; only the model's tokens are trained.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megatron.callbacks import TrainingRun
from megatron.data.conversations import TemplateSettings, conversation
from megatron.generation.prompts.chat import ChatTemplate
from megatron.methods.reinforcement.answers import Answer, Transcript
from megatron.methods.reinforcement.environments.environments import EnvironmentFailure, Environments, Observation
from megatron.methods.reinforcement.keys import rollout_keys
from megatron.methods.reinforcement.prompts import Messages, fitted
from megatron.methods.reinforcement.rewards.functions import Failure, RewardError, Scores
from megatron.methods.reinforcement.sampler import AnswerRequest, Turn, room_for
from megatron.mpu import mix_seed

ENVIRONMENT = "environment"
"""The name of the environment's reward among the parts of an answer's reward."""
_CHARACTERS = 32  # per token allowed: of a longer text only such a prefix is tokenised first
_SPLIT_TOKENS = 64  # a prefix may have this many more tokens than the same part of the full text


class Speech:
    """Converts prompts and messages to tokens, and tokens to text.

    template: the chat template; None if all prompts are plain texts.
    """

    def __init__(self, run: TrainingRun, template: ChatTemplate | None, stop_token_ids: Sequence[int]) -> None:
        self.run, self.template, self.stop_token_ids = run, template, stop_token_ids

    def exceeds(self, observation: Observation, tokens: int) -> bool:
        """Returns whether an environment's observation has more than `tokens` tokens.

        Of a much longer text only a prefix is tokenised: to tokenise 10 MB takes minutes and gigabytes.
        """
        text = "".join(_texts(observation))
        length = _CHARACTERS * max(tokens, 1)  # there may be no room at all
        while length < len(text):
            if len(self.run.tokenizer.tokenize_bare(text[:length])) > tokens + _SPLIT_TOKENS:
                return True
            length *= 4
        return False

    def prompt_tokens(self, prompt: str | Messages, settings: TemplateSettings) -> list[int]:
        """Returns the tokens of a prompt. Raises ValueError if the chat template refuses the messages."""
        if isinstance(prompt, str):
            return self.run.tokenizer.tokenize(prompt)
        assert self.template is not None
        return self.template.tokens(prompt, settings)

    def text(self, tokens: Sequence[int], finished: bool) -> str:
        """Returns the text of tokens that the model wrote, without the stop token of a finished answer."""
        ends_with_stop = finished and tokens and tokens[-1] in self.stop_token_ids
        return self.run.tokenizer.detokenize(tokens[:-1] if ends_with_stop else tokens)

    def observation_tokens(
        self,
        observation: Observation,
        prompt: str | Messages,
        settings: TemplateSettings,
        messages: Messages,
        last: int,
    ) -> tuple[list[int], Messages]:
        """Returns an environment's observation as tokens to append to the row, and as messages.

        The tokens include the template's text between the model's last token and its next turn.
        messages: all messages after the prompt. last: the model's last token. Raises ValueError if the
            template cannot append messages, or if the observation is messages but the prompt is a text.
        """
        if isinstance(prompt, str):
            if not isinstance(observation, str):
                raise ValueError(
                    "step returned messages, but the prompt is a plain text; return a text, or make prompts lists of "
                    "messages"
                )
            return self.run.tokenizer.tokenize_bare(observation), [{"role": "user", "content": observation}]
        assert self.template is not None
        replies: Messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else []
        if observation and not isinstance(observation, str):
            replies = conversation(observation, "observation")
        return self.template.tokens_after([*prompt, *messages[:-1]], settings, last, replies), replies


def _texts(observation: Any) -> Iterator[str]:
    """Yields all strings in an observation, which may be nested in lists and dicts."""
    if isinstance(observation, str):
        yield observation
    elif isinstance(observation, list | dict):
        for part in observation.values() if isinstance(observation, dict) else observation:
            yield from _texts(part)


def opening(prompt: str | Messages, observation: Observation) -> str | Messages:
    """Returns the prompt extended by the observation that an environment's `reset` returned.

    A text is appended to a plain prompt, or to the last message of a list, as in TRL. Messages are appended
    to the list of messages. Raises ValueError if prompt and observation do not fit.
    """
    if not observation:
        return prompt
    if isinstance(prompt, str):
        if not isinstance(observation, str):
            raise ValueError("reset returned messages, but the prompt is a plain text; return a text")
        return prompt + observation
    if not isinstance(observation, str):
        return [*prompt, *conversation(observation, "observation")]
    content = prompt[-1].get("content")
    if content is None:
        raise ValueError(
            "reset returned a text, but the prompt's last message has no content to append it to; return messages"
        )
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


class Conversation:
    """Holds one conversation between the model and an environment, on rank 0.

    turn: the request for the model's next text; its `room` is 0 when the conversation is over.
    answer: the full conversation; None until it is over.
    """

    def __init__(self, speech: Speech, environments: Environments, request: AnswerRequest) -> None:
        self._speech, self._environments, self._request = speech, environments, request
        self._environment: Any = None
        self._prompt: str | Messages = request[0].row.prompt
        self._tokens: list[int] = request[0].tokens
        self._written: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._messages: Messages = []
        self._rewards: list[float] = []
        self._turns = 0
        self.turn = Turn(self._tokens, 0, 0)
        self.answer: Answer | None = None

    def begin(self) -> None:
        """Starts and resets the environment, and sets `turn`. If this fails, the conversation ends without a
        reward."""
        run, row = self._speech.run, self._request[0].row
        seed = mix_seed(run.args.seed, "environment", self._request[0].number) % 2**31
        tokens = self._tokens
        try:
            self._environment = self._environments.open()
            observation = self._environment.reset(row.prompt, seed, row.columns)
            if self._speech.exceeds(observation, run.args.seq_length):
                raise ValueError(
                    f"reset returned more tokens than fit into a row (seq_length {run.args.seq_length}); return less "
                    "text"
                )
            prompt = opening(row.prompt, observation)
            if prompt is not row.prompt:
                tokens = fitted(run.args, self._speech.prompt_tokens(prompt, row.settings))
        except (EnvironmentFailure, ValueError) as problem:
            return self._end(False, str(problem))
        self._prompt, self._tokens = prompt, tokens
        self._next()

    def take(self, turn: Answer) -> None:
        """Passes the model's text to the environment, and sets the next `turn`, or `answer` if the
        conversation is over.

        It is over when the environment says so, or the model's text was truncated, or at `max_turns`, or when
        the row is full.
        """
        self._add(turn.tokens, turn.logprobs, True)
        self._turns += 1
        written = self._speech.text(turn.tokens, turn.finished)
        self._messages.append({"role": "assistant", "content": written})
        try:
            outcome = self._environment.step(written, turn.tokens)
            if outcome.reward is not None:
                self._rewards.append(outcome.reward)
            if outcome.done or not turn.finished or self._turns == rollout_keys(self._speech.run.args)["max_turns"]:
                return self._end(outcome.done and turn.finished)
            if self._speech.exceeds(outcome.observation, self._room()):
                return self._end(False)
            tokens, replies = self._speech.observation_tokens(
                outcome.observation, self._prompt, self._request[0].row.settings, self._messages, turn.tokens[-1]
            )
        except (EnvironmentFailure, ValueError) as problem:
            return self._end(False, str(problem))
        if len(tokens) >= self._room():
            return self._end(False)
        self._add(tokens, [0.0] * len(tokens), False)
        self._messages += replies
        self._next()

    def close(self) -> None:
        """Ends the process of this conversation's environment."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _room(self) -> int:
        return room_for(self._speech.run, self._tokens) - len(self._written)

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float], from_model: bool) -> None:
        self._written += tokens
        self._logprobs += logprobs
        self._mask += [from_model] * len(tokens)

    def _next(self) -> None:
        (prompt, number), turn_number = self._request, [self._turns] if self._turns else []
        seed = mix_seed(self._speech.run.args.seed, "rollout", prompt.number, number, *turn_number)
        self.turn = Turn(self._tokens + self._written, self._room(), seed)

    def _end(self, finished: bool, failure: str | None = None) -> None:
        if failure is None:
            try:
                self._environment.finish()
            except EnvironmentFailure as problem:
                failure = f"close: {problem}"
        self.close()
        reward = sum(self._rewards) if failure is None else None
        transcript = Transcript(self._prompt, self._messages, reward, failure)
        self.answer = Answer(self._tokens, self._written, self._logprobs, finished, self._mask, transcript)
        self.turn = Turn(self._tokens + self._written, 0, 0)


class Conversations:
    """Holds all conversations of a run, on rank 0.

    If the training processes sample, all conversations of a generation advance together, turn by turn
    (`begin`, `take`, `answers`). If servers sample, each conversation runs on its own from beginning to end
    (`hold`), also in threads.
    """

    def __init__(self, speech: Speech, environments: Environments) -> None:
        self.speech, self.environments = speech, environments
        self._held: list[Conversation] = []

    def begin(self, requests: Sequence[AnswerRequest]) -> list[Turn]:
        """Starts the conversations of a generation, and returns the model's first turn in each."""
        self._held = [Conversation(self.speech, self.environments, request) for request in requests]
        return self._run_all([conversation.begin for conversation in self._held])

    def take(self, turns: Sequence[Answer]) -> list[Turn]:
        """Passes the model's texts to the environments, and returns the next turn of each conversation.

        turns: the model's texts, one per conversation. A turn with room 0 means that the conversation is
            over.
        """
        return self._run_all(
            [
                partial(conversation.take, turn)
                for conversation, turn in zip(self._held, turns, strict=True)
                if conversation.answer is None
            ]
        )

    def answers(self) -> list[Answer]:
        """Returns all conversations of the generation as answers. Call it once all are over."""
        held, self._held = self._held, []
        return [conversation.answer for conversation in held if conversation.answer is not None]

    def hold(self, request: AnswerRequest, write: Callable[[Turn], Answer]) -> Answer:
        """Runs one conversation from beginning to end, and returns it as an answer.

        write: function that returns the model's text for a turn.
        """
        conversation = Conversation(self.speech, self.environments, request)
        try:
            conversation.begin()
            while conversation.answer is None:
                conversation.take(write(conversation.turn))
        finally:
            conversation.close()
        return conversation.answer

    def close(self) -> None:
        """Ends the processes of all environments."""
        self.environments.close()

    def _run_all(self, steps: Sequence[Callable[[], None]]) -> list[Turn]:
        """Calls the functions in threads, waits for all, and returns the next turn of each conversation."""
        with ThreadPoolExecutor(self.environments.workers) as pool:
            try:
                for _ in pool.map(lambda step: step(), steps):
                    pass
            except BaseException:  # KeyboardInterrupt too: ends environments, for which threads would still wait
                self.close()
                raise
        return [conversation.turn for conversation in self._held]


def with_environment(scores: Scores, answers: Sequence[Answer]) -> Scores:
    """Returns the scores with the environment's reward of each answer added as one more part.

    Raises RewardError if all conversations failed: then the environment class does not fit the prompts or the
    template.
    """
    transcripts = [answer.transcript for answer in answers]
    rewards = [None if transcript is None else transcript.reward for transcript in transcripts]
    failures = [
        Failure(ENVIRONMENT, row, transcript.failure)
        for row, transcript in enumerate(transcripts)
        if transcript is not None and transcript.failure is not None
    ]
    if len(failures) == len(answers):
        raise RewardError(f"all {len(answers)} conversations failed, the first because: {failures[0].reason}")
    return Scores({**scores.parts, ENVIRONMENT: rewards}, [*scores.failures, *failures])
