"""Prompts typed at a terminal or piped in: `text_gen_type: interactive`."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from megatron.generation import RequestError
from megatron.generation.interactive import PROMPT, Conversation, TypedPrompts
from megatron.generation.prompts.chat import ChatTemplate
from megatron.tokenizer import CharLevelTokenizer
from tests.generation.runs import command, lines
from tests.generation.runs import run_script as run
from tests.generation.test_generate_script import ROOT, words
from tests.marks import with_more
from tests.pool import run_ranks

__all__ = ["words"]  # the fixture
PROMPTS = ("Once upon a time", "The cat", "A")


@pytest.fixture
def texts(words: list[str], tmp_path: Path) -> list[str]:
    """Returns the texts that generate.py writes for a file of `PROMPTS`."""
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS))
    argv = [*words, "text_gen_type=input-file", "-i", f"{tmp_path}/in.txt", "-o", f"{tmp_path}/out.jsonl"]
    assert run(*argv)[0] == 0
    completions = [sample["text"] for sample in lines(tmp_path / "out.jsonl")]
    assert len(set(completions)) == 3
    return completions


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, ["pipe_parallel_size=2"])])
def test_piped_prompts_get_the_text_of_a_file(words: list[str], texts: list[str], tmp_path: Path, ranks: int,
                                              layout: list[str]) -> None:  # fmt: skip
    (tmp_path / "samples.txt").unlink(missing_ok=True)
    argv = [*words, "text_gen_type=interactive", *layout]
    first_rank, *other_ranks = run_ranks(command, ranks, argv, stdin_text="\n".join(PROMPTS), init=False)
    assert (first_rank[0], first_rank[2]) == (0, "") and other_ranks == [(0, "", "")] * (ranks - 1)
    assert first_rank[1].endswith("\n" + "".join(f"{text}\n" for text in texts))
    assert "sample_output_file is not written" in first_rank[1]
    assert not (tmp_path / "samples.txt").exists()


def test_a_long_context_is_truncated_and_no_input_is_refused(words: list[str]) -> None:
    argv = [*words, "text_gen_type=interactive"]
    code, out, _ = run(*argv, stdin_text="the quick brown fox " * 20)
    assert code == 0 and re.search("\nWARNING: .* 44 of the context's ", out)
    for code, _, err in run_ranks(command, 2, [*argv, "model_parallel_size=2"], stdin_text="", init=False):
        assert code == 1 and re.fullmatch("generate.py: error: .*text_gen_type: interactive .*\n", err)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def test_a_conversation_goes_through_the_template_with_its_history(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "system.txt").write_text("Be.\n")
    chat = ["text_gen_type=interactive", "chat=true", f"chat_template={tmp_path}/chat.jinja", "maximum_tokens=5",
            f"system_prompt_file={tmp_path}/system.txt", "temperature=0"]  # fmt: skip
    code, out, err = run(*words, *chat, stdin_text="Hi\nA\n" + "the quick brown fox " * 20)
    assert (code, err) == (0, "")
    *_, first_answer, second_answer, long = out.splitlines()
    assert first_answer and second_answer and re.match("WARNING: .* tokens", long)


@pytest.mark.parametrize(("changes", "message"), [
    (["chat=true"], "chat: .*text_gen_type: interactive"),
    (["system_prompt_file=a"], "system_prompt_file: .*chat: true"),
    (["stop_strings=['']"], "stop_strings: "),
    (["text_gen_type=interactive", "chat=true", "system_prompt_file=/no/such"], "/no/such: "),
])  # fmt: skip
def test_what_makes_no_conversation_is_refused(words: list[str], tmp_path: Path, changes: list[str],
                                               message: str) -> None:  # fmt: skip
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    code, _, err = run(*words, f"chat_template={tmp_path}/chat.jinja", *changes, stdin_text="Hi\n")
    assert code == 1 and re.fullmatch(f".*{message}.*\n", err)


def test_a_long_conversation_forgets_its_beginning() -> None:
    tokenizer = CharLevelTokenizer()
    talk = Conversation(ChatTemplate(TEMPLATE, tokenizer, "here"), "S", max_prompt_tokens=60)
    turns = []
    for question, answer in (("one", "two"), ("three", "4"), ("5", "6")):
        tokens, message = talk.ask(question)
        turns.append((tokenizer.detokenize(tokens), message))
        talk.answer(answer)
    assert turns[0] == ("<system> S\n<user> one\n<assistant> ", None)
    assert turns[1][0] == "<system> S\n<user> three\n<assistant> " and "first 2 turns" in str(turns[1][1])
    assert turns[2] == ("<system> S\n<user> three\n<assistant> 4\n<user> 5\n<assistant> ", None)
    with pytest.raises(RequestError, match="97 tokens"):
        talk.ask("x" * 66)


class Terminal:
    def __init__(self, argv: list[str]) -> None:
        self.parent_end, child_end = pty.openpty()
        # As at a terminal: what a shell starts in the background, as test runs are, ignores SIGINT.
        interrupted = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(argv, stdin=child_end, stdout=child_end, stderr=child_end, env=env,
                                        start_new_session=True, close_fds=True, preexec_fn=interrupted)  # fmt: skip
        os.close(child_end)
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self.parent_end, text.encode())

    def expect(self, text: str, seconds: float = 300.0) -> str:
        """Returns the output before `text`, with newlines as programs write them."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.output}"
            if select.select([self.parent_end], [], [], 0.5)[0]:
                try:
                    data = os.read(self.parent_end, 65536)
                except OSError:
                    raise AssertionError(f"ended before {text!r} came: {self.output}") from None
                self.output += data.decode().replace("\r\n", "\n")
        preceding, _, self.output = self.output.partition(text)
        return preceding


@contextmanager
def terminal(argv: list[str]) -> Iterator[Terminal]:
    started = Terminal(argv)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
        started.process.wait(200)
        os.close(started.parent_end)


@pytest.mark.ends_processes
@pytest.mark.parametrize("ranks", with_more([1, 2], 1, product=[2]))
def test_a_conversation_through_deepy(words: list[str], texts: list[str], ranks: int) -> None:
    """One rank is interrupted, two see the end of input; deepy.py's own flags reach them."""
    argv = [sys.executable, str(ROOT / "deepy.py"), "--num_gpus", str(ranks), str(ROOT / "generate.py"), *words]
    with terminal([*argv, "text_gen_type=interactive", f"pipe_parallel_size={ranks}", "-i", "prompts"]) as session:
        session.expect("sample_input_file is not read")
        for prompt, text in zip(PROMPTS[:2], texts, strict=False):
            session.expect(PROMPT)
            session.type(prompt + "\n")
            session.expect(prompt + "\n")  # the terminal's echo
            session.expect(text + "\n")
        session.expect(PROMPT)
        if ranks == 1:
            session.process.send_signal(signal.SIGINT)
            assert "Traceback" not in session.expect("generate.py: interrupted\n")
        else:
            session.type("\x04")
        assert session.process.wait(300) == (130 if ranks == 1 else 0)


@pytest.mark.parametrize(("stdin_text", "prompt_end", "prompts"), [
    ("one\n two \nthree", "\n", ["one", "two", "three", ""]),
    ("one\n\ntwo\n", "\n", ["one", "", "two", ""]),
    ("one\nstop\ntwo\n", "\n", ["one", "", ""]),
    ("stop", "\n", ["", ""]),
    ("stop it\nstopped\n", "\n", ["stop it", "stopped", ""]),
    ("two\nlines<END>\nthree <END> four<END>\n", "<END>", ["two\nlines", "three", "four", ""]),
    ("one<END>\nstop\n", "<END>", ["one", "", ""]),
    ("", "\n", ["", ""]),
])  # fmt: skip
def test_prompts_end_where_they_should(stdin_text: str, prompt_end: str, prompts: list[str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, stdin_text.encode())
    os.close(writer)
    source = TypedPrompts(reader, prompt_end)
    assert [source.next(None) for _ in prompts] == prompts
    os.close(reader)


def test_waiting_is_bounded() -> None:
    reader, writer = os.pipe()
    source = TypedPrompts(reader, "\n")
    assert source.next(0.01) is None
    for part in ("dé".encode()[:2], "dé".encode()[2:]):
        os.write(writer, part)
        assert source.next(0.01) is None
    os.write(writer, b"\n")
    assert source.next(0.01) == "dé"
    os.close(reader)
    os.close(writer)
