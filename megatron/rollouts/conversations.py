"""Conversations between the model and environments (`rollout.environment`): turn by turn, with the tokens of
both sides in one row, of which the model's are trained."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megatron.callbacks import TrainingRun
from megatron.data.conversations import TemplateSettings, conversation
from megatron.generation.prompts.chat import ChatTemplate
from megatron.mpu import mix_seed
from megatron.rollouts.answers import Answer, Transcript
from megatron.rollouts.environments.environments import EnvironmentFailure, Environments, Observation
from megatron.rollouts.prompts import Messages, fitted
from megatron.rollouts.rewards import Failure, RewardError, Scores
from megatron.rollouts.sampler import Asked, Turn, room_for

ENVIRONMENT = "environment"
"""The name of an environment's part of the reward."""
_CHARACTERS = 32  # of a token, in a text so long that its beginning is counted first
_CUT = 64  # tokens by which the cut end of a beginning may be more than the same text in its whole


class Speech:
    """What is said as tokens. template: None where no prompt is made of messages."""

    def __init__(self, run: TrainingRun, template: ChatTemplate | None, stop_token_ids: Sequence[int]) -> None:
        self.run, self.template, self.stop_token_ids = run, template, stop_token_ids

    def exceeds(self, said: Observation, tokens: int) -> bool:
        """Whether what an environment said has more than so many tokens. Of a text that is far longer only a
        beginning is read: tokenising 10 MB takes minutes and gigabytes."""
        text = "".join(_texts(said))
        length = _CHARACTERS * max(tokens, 1)  # there may be no room at all
        while length < len(text):
            if len(self.run.tokenizer.tokenize_bare(text[:length])) > tokens + _CUT:
                return True
            length *= 4
        return False

    def of_prompt(self, prompt: str | Messages, settings: TemplateSettings) -> list[int]:
        """A prompt as the model reads it. Raises ValueError, RequestError among them."""
        if isinstance(prompt, str):
            return self.run.tokenizer.tokenize(prompt)
        assert self.template is not None
        return self.template.tokens(prompt, settings)

    def of_opening(self, prompt: str | Messages, settings: TemplateSettings) -> list[int]:
        """The same, of a prompt that an environment has added to."""
        return fitted(self.run.args, self.of_prompt(prompt, settings))

    def text(self, tokens: Sequence[int], finished: bool) -> str:
        """The text of tokens that the model wrote, without the token that ends them if they are finished."""
        ended = finished and tokens and tokens[-1] in self.stop_token_ids
        return self.run.tokenizer.detokenize(tokens[:-1] if ended else tokens)

    def of_observation(
        self, said: Observation, prompt: str | Messages, settings: TemplateSettings, messages: Messages, last: int
    ) -> tuple[list[int], Messages]:
        """What an environment said, between the model's last token and its next turn, as tokens and as
        messages. messages: since the prompt, with the model's. Raises ValueError."""
        if isinstance(prompt, str):
            if not isinstance(said, str):
                raise ValueError("it answers a text with messages; return a text, or let prompts be messages")
            return self.run.tokenizer.tokenize_bare(said), [{"role": "user", "content": said}]
        assert self.template is not None
        replies: Messages = [{"role": "user", "content": said}] if isinstance(said, str) else []
        if said and not isinstance(said, str):
            replies = conversation(said, "observation")
        return self.template.tokens_after([*prompt, *messages[:-1]], settings, last, replies), replies


def _texts(said: Any) -> Iterator[str]:
    """All texts in an observation."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, list | dict):
        for one in said.values() if isinstance(said, dict) else said:
            yield from _texts(one)


def opening(prompt: str | Messages, said: Observation) -> str | Messages:
    """The prompt with what `reset` returned: a text is added to the prompt, or to the last of its messages,
    as by TRL; messages come after its own. Raises ValueError."""
    if not said:
        return prompt
    if isinstance(prompt, str):
        if not isinstance(said, str):
            raise ValueError("reset returned messages, and the prompt is a text; return a text")
        return prompt + said
    if not isinstance(said, str):
        return [*prompt, *conversation(said, "observation")]
    content = prompt[-1].get("content")
    if content is None:
        raise ValueError("reset returned a text, and the prompt's last message holds none; return messages")
    return [*prompt[:-1], {**prompt[-1], "content": content + said}]


class Conversation:
    """One conversation, on rank 0. turn: the model's next one, of no room when the conversation is over;
    answer: what it was then."""

    def __init__(self, speech: Speech, environments: Environments, one: Asked) -> None:
        self._speech, self._environments, self._asked = speech, environments, one
        self._environment: Any = None
        self._prompt: str | Messages = one[0].row.prompt
        self._tokens: list[int] = one[0].tokens
        self._written: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._messages: Messages = []
        self._rewards: list[float] = []
        self._turns = 0
        self.turn = Turn(self._tokens, 0, 0)
        self.answer: Answer | None = None

    def begin(self) -> None:
        """Reset the environment."""
        run, row = self._speech.run, self._asked[0].row
        seed = mix_seed(run.args.seed, "environment", self._asked[0].number) % 2**31
        tokens = self._tokens
        try:
            self._environment = self._environments.open()
            said = self._environment.reset(row.prompt, seed, row.columns)
            if self._speech.exceeds(said, run.args.seq_length):
                raise ValueError(f"reset returned more than a row holds (seq_length {run.args.seq_length})")
            prompt = opening(row.prompt, said)
            if prompt is not row.prompt:
                tokens = self._speech.of_opening(prompt, row.settings)
        except (EnvironmentFailure, ValueError) as problem:
            return self._end(False, str(problem))
        self._prompt, self._tokens = prompt, tokens
        self._next()

    def take(self, turn: Answer) -> None:
        """Hand the environment what the model wrote. A turn without an end is the last one."""
        options = self._speech.run.args.rollout
        assert options is not None
        self._add(turn.tokens, turn.logprobs, True)
        self._turns += 1
        said = self._speech.text(turn.tokens, turn.finished)
        self._messages.append({"role": "assistant", "content": said})
        try:
            outcome = self._environment.step(said, turn.tokens)
            if outcome.reward is not None:
                self._rewards.append(outcome.reward)
            if outcome.done or not turn.finished or self._turns == options["max_turns"]:
                return self._end(outcome.done and turn.finished)
            if self._speech.exceeds(outcome.observation, self._room()):
                return self._end(False)
            tokens, replies = self._speech.of_observation(
                outcome.observation, self._prompt, self._asked[0].row.settings, self._messages, turn.tokens[-1]
            )
        except (EnvironmentFailure, ValueError) as problem:
            return self._end(False, str(problem))
        if len(tokens) >= self._room():
            return self._end(False)
        self._add(tokens, [0.0] * len(tokens), False)
        self._messages += replies
        self._next()

    def close(self) -> None:
        """End its environment."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _room(self) -> int:
        return room_for(self._speech.run, self._tokens) - len(self._written)

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float], by_model: bool) -> None:
        self._written += tokens
        self._logprobs += logprobs
        self._mask += [by_model] * len(tokens)

    def _next(self) -> None:
        (prompt, number), later = self._asked, [self._turns] if self._turns else []
        seed = mix_seed(self._speech.run.args.seed, "rollout", prompt.number, number, *later)
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
    """All conversations of a run, on rank 0: those of a generation turn by turn (`begin`, `take`,
    `answers`), or one after the other or in threads, each from its beginning to its end (`hold`)."""

    def __init__(self, speech: Speech, environments: Environments) -> None:
        self.speech, self.environments = speech, environments
        self._held: list[Conversation] = []

    def check(self, columns: Collection[str]) -> None:
        """Start what environments run in. columns: the fields of rows of prompts. Raises RewardError for a
        class that does not work with them."""
        self.environments.check(columns)

    def begin(self, asked: Sequence[Asked]) -> list[Turn]:
        """The first turn of each conversation of a generation."""
        self._held = [Conversation(self.speech, self.environments, one) for one in asked]
        return self._after([conversation.begin for conversation in self._held])

    def take(self, turns: Sequence[Answer]) -> list[Turn]:
        """The next turn of each, of no room where it is over. turns: what the model wrote in those before."""
        return self._after(
            [
                partial(conversation.take, turn)
                for conversation, turn in zip(self._held, turns, strict=True)
                if conversation.answer is None
            ]
        )

    def answers(self) -> list[Answer]:
        """The conversations, when all are over."""
        found = [conversation.answer for conversation in self._held]
        self._held = []
        return [answer for answer in found if answer is not None]

    def hold(self, one: Asked, write: Callable[[Turn], Answer]) -> Answer:
        """One conversation from its beginning to its end. write: what the model writes in a turn."""
        conversation = Conversation(self.speech, self.environments, one)
        try:
            conversation.begin()
            while conversation.answer is None:
                conversation.take(write(conversation.turn))
        finally:
            conversation.close()
        return conversation.answer

    def close(self) -> None:
        """End all environments."""
        self.environments.close()

    def _after(self, works: Sequence[Callable[[], None]]) -> list[Turn]:
        """All turns, when these are done."""
        with ThreadPoolExecutor(self.environments.workers) as pool:
            try:
                for _ in pool.map(lambda work: work(), works):
                    pass
            except BaseException:  # KeyboardInterrupt too; the threads would wait for the environments
                self.close()
                raise
        return [conversation.turn for conversation in self._held]


def with_environment(scores: Scores, answers: Sequence[Answer]) -> Scores:
    """The scores with what environments gave as one more part. Raises RewardError where all failed, as they
    do where class and prompts or template do not fit."""
    transcripts = [answer.transcript for answer in answers]
    rewards = [None if transcript is None else transcript.reward for transcript in transcripts]
    failures = [
        Failure(ENVIRONMENT, row, transcript.failure)
        for row, transcript in enumerate(transcripts)
        if transcript is not None and transcript.failure is not None
    ]
    if len(failures) == len(answers):
        raise RewardError(f"all {len(answers)} conversations failed, the first: {failures[0].reason}")
    return Scores({**scores.parts, ENVIRONMENT: rewards}, [*scores.failures, *failures], scores.seconds)
