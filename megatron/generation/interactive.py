"""Implements `text_gen_type: interactive`: reads prompts from rank 0's terminal and shows text as it is
generated."""

import codecs
import os
import select
import sys
from collections.abc import Callable

from megatron.data.conversations import Message
from megatron.distributed import on_rank_zero
from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import Request, RequestError
from megatron.generation.prompts.chat import ChatTemplate, find_shared_template
from megatron.generation.prompts.files import NOT_STARTED, make_prompts, system_prompt
from megatron.generation.sampling import SamplingParams
from megatron.model import Model
from megatron.mpu import mix_seed

PROMPT = "Context prompt >>> "  # as in GPT-NeoX
CHAT_PROMPT = ">>> "
_HEARTBEAT_S = 5.0  # ranks that wait in a collective hear from rank 0 this often


class TypedPrompts:
    """Reads prompts from a file descriptor while they are typed. The text `prompt_end` ends each prompt."""

    def __init__(self, descriptor: int, prompt_end: str) -> None:
        self.descriptor, self.prompt_end = descriptor, prompt_end
        self.text = ""  # text that was read and is not yet returned
        self.open = True
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, patience: float | None) -> str | None:
        """Returns the next prompt, stripped, or None if nothing is typed for `patience` seconds (None: waits
        for ever).

        Returns "" if there are no more prompts: after an empty prompt, the line `stop`, or the end of input.
        """
        while self.open and self.prompt_end not in self.text and not self._stopped():
            if not select.select([self.descriptor], [], [], patience)[0]:
                return None
            try:
                data = os.read(self.descriptor, 64 * 1024)
            except OSError:  # the terminal was closed
                data = b""
            self.open = bool(data)
            self.text += self.decoder.decode(data, final=not data)
        if self._stopped():
            return ""
        prompt, _, self.text = self.text.partition(self.prompt_end)
        return prompt.strip()

    def _stopped(self) -> bool:
        line, newline, _ = self.text.lstrip().partition("\n")
        return line.strip() == "stop" and (bool(newline) or not self.open)


class Conversation:
    """A conversation between a user and the model. The chat template renders each prompt from all turns so
    far."""

    def __init__(self, template: ChatTemplate, system: str | None, max_prompt_tokens: int) -> None:
        """Starts a conversation without turns.

        system: the system prompt; None: no system prompt. max_prompt_tokens: most tokens of a prompt.
        """
        self.template, self.max_prompt_tokens = template, max_prompt_tokens
        self.system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[Message] = []

    def ask(self, text: str) -> tuple[list[int], str | None]:
        """Adds a user's turn. Returns the token ids of the prompt, and a warning if the oldest turns were
        dropped so that the prompt fits (else None).

        Raises RequestError, without adding the turn, if the turn alone is too long.
        """
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
        dropped_turns = 0
        while len(tokens := self.template.tokens([*self.system, *turns])) > self.max_prompt_tokens:
            if len(turns) < 3:
                raise RequestError(
                    f"this message (with template and system prompt) has {len(tokens)} tokens, but at most "
                    f"{self.max_prompt_tokens} fit; shorten the message"
                )
            del turns[:2]
            dropped_turns += 2
        self.turns = turns
        warning = f"WARNING: the first {dropped_turns} turns were left out, because the conversation is too long"
        return tokens, warning if dropped_turns else None

    def answer(self, text: str) -> None:
        """Adds the model's answer to the conversation."""
        self.turns.append({"role": "assistant", "content": text})


def _conversation(model: Model) -> Conversation | None:
    args = model.args
    if not args.chat:
        return None
    template = find_shared_template(args, model.tokenizer, model.groups)
    system = on_rank_zero(model.groups, lambda: system_prompt(args))
    return Conversation(template, system, model.positions - args.maximum_tokens)


def _write_answer(batcher: Batcher, write: Callable[[str], None]) -> str:
    """Runs the only request of `batcher` to its end. Passes each new piece of text to `write`, and returns
    the full text."""
    answer, count = "", 0
    while batcher.busy:
        for event in batcher.step():
            write(event.text)
            answer += event.text
            count += len(event.tokens)
    started = count > 1 or bool(answer)
    write("\n" if started else f"{NOT_STARTED}\n")
    return answer


def converse(model: Model) -> int:
    """Reads prompts from rank 0's standard input and writes answers to its standard output. Returns their
    number.

    Without `chat`, the model continues each prompt, as with `text_gen_type: input-file`. All ranks call this
    function together. Raises ConfigError if the input is not a terminal and ends before the first prompt.
    """
    args, groups = model.args, model.groups
    conversation = _conversation(model)
    batcher = Batcher(model, maximum_rows=1)
    is_rank_zero = groups.world_rank == 0
    typed_prompts = (
        TypedPrompts(sys.stdin.fileno(), args.prompt_end) if is_rank_zero and sys.stdin is not None else None
    )
    on_terminal = typed_prompts is not None and os.isatty(typed_prompts.descriptor)

    def write(text: str) -> None:
        if is_rank_zero:
            sys.stdout.write(text)
            sys.stdout.flush()

    def wait() -> str | None:
        return typed_prompts.next(_HEARTBEAT_S if groups.world_size > 1 else None) if typed_prompts is not None else ""

    def refuse_empty_input() -> None:
        if not on_terminal:
            raise args.error(
                "text_gen_type",
                "interactive reads prompts from rank 0's standard input, which ended before the first prompt; use a "
                "terminal or a pipe, or text_gen_type: input-file with -i FILE",
            )

    number = 0
    while True:
        write((PROMPT if conversation is None else CHAT_PROMPT) if on_terminal else "")
        text = None
        while text is None:
            text = on_rank_zero(groups, wait)
        if not text:
            write("\n" if on_terminal else "")
            if number == 0:
                on_rank_zero(groups, refuse_empty_input)
            return number
        stop_token_ids, message = None, None
        if conversation is None:
            prompt = make_prompts([text], args, model.tokenizer)[0]
            tokens, message = prompt.tokens, prompt.message
        else:
            try:
                tokens, message = conversation.ask(text)
            except RequestError as problem:
                write(f"WARNING: {problem}\n")
                continue
            stop_token_ids = (*model.stop_token_ids, *conversation.template.stop_token_ids)
        if message is not None:
            write(f"{message}\n")
        seed = mix_seed(args.seed, "sample", number)
        sampling = SamplingParams.from_args(args)
        batcher.add(Request(tokens, sampling, args.maximum_tokens, seed, args.stop_strings, stop_token_ids))
        answer = _write_answer(batcher, write)
        if conversation is not None:
            conversation.answer(answer)
        number += 1
