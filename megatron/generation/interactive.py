"""`text_gen_type: interactive`: prompts typed at the terminal of rank 0, text shown as it comes."""

from __future__ import annotations

import codecs
import os
import select
import sys
from collections.abc import Callable

from megatron.generation.complete import Step, complete
from megatron.generation.model import Model
from megatron.generation.prompts import NOT_STARTED, make_prompts, problem_of
from megatron.generation.sampling import Sampling
from megatron.mpu import mix_seed, on_rank_zero

PROMPT = "Context prompt >>> "  # GPT-NeoX's
_PATIENCE_S = 5.0  # ranks that wait in a collective hear from rank 0 this often


class TypedPrompts:
    """Prompts read from a file descriptor as they are typed, each ended by `prompt_end`."""

    def __init__(self, descriptor: int, prompt_end: str) -> None:
        self.descriptor, self.prompt_end = descriptor, prompt_end
        self.text = ""  # read, not yet used
        self.open = True
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, patience: float | None) -> str | None:
        """The next prompt without white space around it, "" at the end, which an empty one, the line `stop` and the end
        of input are. None when it has not come after `patience` seconds."""
        while self.open and self.prompt_end not in self.text and not self._stopped():
            if not select.select([self.descriptor], [], [], patience)[0]:
                return None
            try:
                data = os.read(self.descriptor, 64 * 1024)
            except OSError:  # a terminal that is gone
                data = b""
            self.open = bool(data)
            self.text += self.decoder.decode(data, final=not data)
        if self._stopped():
            return ""
        prompt, _, self.text = self.text.partition(self.prompt_end)
        return prompt.strip()

    def _stopped(self) -> bool:
        first, newline, _ = self.text.lstrip().partition("\n")
        return first.strip() == "stop" and (bool(newline) or not self.open)


class Stream:
    """Text of one row, handed on as far as its characters are complete."""

    def __init__(self, detokenize: Callable[[list[int]], str], eod: int, write: Callable[[str], None]) -> None:
        self.detokenize, self.eod, self.write = detokenize, eod, write
        self.tokens: list[int] = []
        self.shown = 0

    def add(self, step: Step) -> None:
        """The next token, if it is not the end of document."""
        self.tokens += [token for token in step.tokens if token != self.eod]
        text = self.detokenize(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else the rest of its bytes is yet to come
            self._show(text)

    def finish(self) -> None:
        """Also what is no whole character."""
        self._show(self.detokenize(self.tokens))

    def _show(self, text: str) -> None:
        self.write(text[self.shown :])
        self.shown = len(text)


def converse(model: Model) -> int:
    """Answer prompts of rank 0's standard input on its standard output until they end; how many there were.

    Each gets the text it would get in a file of these prompts. All ranks call it together. Raises ConfigError where
    input ends before the first prompt and nobody is there to see why.
    """
    args, groups = model.args, model.groups
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    first = groups.world_rank == 0
    typed = TypedPrompts(sys.stdin.fileno(), args.prompt_end) if first and sys.stdin is not None else None
    on_terminal = typed is not None and os.isatty(typed.descriptor)

    def write(text: str) -> None:
        if first:
            sys.stdout.write(text)
            sys.stdout.flush()

    def wait() -> str | None:
        return typed.next(_PATIENCE_S if groups.world_size > 1 else None) if typed is not None else ""

    def refuse() -> None:
        if not on_terminal:
            raise problem_of(
                args,
                "text_gen_type",
                "interactive takes prompts from the standard input of rank 0, which ended before the first one; use a "
                "terminal, a pipe, or input-file with -i FILE",
            )

    number = 0
    while True:
        write(PROMPT if on_terminal else "")
        text = None
        while text is None:
            text = on_rank_zero(groups, wait)
        if not text:
            write("\n" if on_terminal else "")
            if number == 0:
                on_rank_zero(groups, refuse)
            return number
        prompt = make_prompts([text], args, model.tokenizer)[0]
        if prompt.message is not None:
            write(f"{prompt.message}\n")
        stream = Stream(model.tokenizer.detokenize, model.tokenizer.eod, write)
        seeds = [mix_seed(args.seed, "sample", number)]
        complete(model, [prompt.tokens], sampling, maximum_tokens=args.maximum_tokens, seeds=seeds, on_step=stream.add)
        stream.finish()
        write("\n" if stream.tokens else f"{NOT_STARTED}\n")
        number += 1
