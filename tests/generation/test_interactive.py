"""Prompts typed at a terminal or piped in: `text_gen_type: interactive`."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.generation.complete import Step
from megatron.generation.interactive import PROMPT, Stream, TypedPrompts
from megatron.tokenizer import CharLevelTokenizer
from tests.generation.runs import command, conversation
from tests.generation.test_generate_script import ROOT, lines, words
from tests.pool import run_ranks

__all__ = ["words"]  # the fixture
PROMPTS = ("Once upon a time", "The cat", "A")


@pytest.fixture
def texts(words: list[str], tmp_path: Path) -> list[str]:
    """What generate.py writes for a file of `PROMPTS`."""
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS))
    argv = [*words, "text_gen_type=input-file", "-i", f"{tmp_path}/in.txt", "-o", f"{tmp_path}/out.jsonl"]
    code, _, err = run_ranks(command, 1, argv, init=False)[0]
    assert code == 0, err
    found = [sample["text"] for sample in lines(tmp_path / "out.jsonl")]
    assert len(set(found)) == 3
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, ["model_parallel_size=2"]), (2, ["pipe_parallel_size=2"])])
def test_piped_prompts_get_the_text_of_a_file(
    words: list[str], texts: list[str], tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    (tmp_path / "samples.txt").unlink(missing_ok=True)
    argv = [*words, "text_gen_type=interactive", *layout]
    first, *others = run_ranks(conversation, ranks, argv, "\n".join(PROMPTS), init=False)
    assert (first[0], first[2]) == (0, "")
    assert first[1].endswith("\n" + "".join(f"{text}\n" for text in texts))
    assert "sample_output_file is not written: text_gen_type is interactive" in first[1]
    assert others == [(0, "", "")] * (ranks - 1)
    assert not (tmp_path / "samples.txt").exists()


def test_a_long_context_is_cut_and_says_so(words: list[str]) -> None:
    argv = [*words, "text_gen_type=interactive"]
    code, out, _ = run_ranks(conversation, 1, argv, "the quick brown fox " * 20, init=False)[0]
    assert code == 0
    assert "\nWARNING: only the last 44 of the context's " in out


def test_no_input_is_refused(words: list[str]) -> None:
    for code, _, err in run_ranks(
        conversation, 2, [*words, "text_gen_type=interactive", "model_parallel_size=2"], "", init=False
    ):
        assert code == 1
        assert err.startswith("generate.py: error: --set: text_gen_type: interactive takes prompts from the standard")
        assert err.count("\n") == 1


# -- a terminal --------------------------------------------------------------------------------------------------------


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, argv: list[str]) -> None:
        self.ours, theirs = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True, close_fds=True
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def expect(self, text: str, seconds: float = 100.0) -> str:
        """What came before `text`, newlines as programs write them."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen}"
            if select.select([self.ours], [], [], 0.5)[0]:
                try:
                    data = os.read(self.ours, 65536)
                except OSError:
                    raise AssertionError(f"ended before {text!r} came: {self.seen}") from None
                self.seen += data.decode().replace("\r\n", "\n")
        before, _, self.seen = self.seen.partition(text)
        return before


@contextmanager
def terminal(argv: list[str]) -> Iterator[Terminal]:
    started = Terminal(argv)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
        started.process.wait(20)
        os.close(started.ours)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_conversation_through_deepy(words: list[str], texts: list[str], ranks: int) -> None:
    """One rank is interrupted, two see the end of input; deepy.py's own flags reach them."""
    argv = [sys.executable, str(ROOT / "deepy.py"), "--num_gpus", str(ranks), str(ROOT / "generate.py"), *words]
    with terminal([*argv, "text_gen_type=interactive", f"pipe_parallel_size={ranks}", "-i", "prompts"]) as there:
        there.expect("sample_input_file is not read: text_gen_type is interactive, not input-file\n")
        for prompt, text in zip(PROMPTS[:2], texts, strict=False):
            there.expect(PROMPT)
            there.type(prompt + "\n")
            there.expect(prompt + "\n")  # the terminal's echo
            there.expect(text + "\n")
        there.expect(PROMPT)
        if ranks == 1:
            there.process.send_signal(signal.SIGINT)
            try:
                said = there.expect("generate.py: interrupted\n", seconds=40.0)
            except AssertionError:  # on a loaded machine a key press can come to nothing; people press again
                there.process.send_signal(signal.SIGINT)
                said = there.expect("generate.py: interrupted\n", seconds=40.0)
            assert "Traceback" not in said
        else:
            there.type("\x04")
        assert there.process.wait(30) == (130 if ranks == 1 else 0)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "prompt_end", "prompts"),
    [
        ("one\n two \nthree", "\n", ["one", "two", "three", ""]),
        ("one\n\ntwo\n", "\n", ["one", "", "two", ""]),
        ("one\nstop\ntwo\n", "\n", ["one", "", ""]),
        ("stop", "\n", ["", ""]),
        ("stop it\nstopped\n", "\n", ["stop it", "stopped", ""]),
        ("two\nlines<END>\nthree <END> four<END>\n", "<END>", ["two\nlines", "three", "four", ""]),
        ("one<END>\nstop\n", "<END>", ["one", "", ""]),
        ("", "\n", ["", ""]),
    ],
)
def test_prompts_end_where_they_should(typed: str, prompt_end: str, prompts: list[str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, typed.encode())
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


def test_text_comes_as_soon_as_its_characters_are_whole() -> None:
    written: list[str] = []
    tokenizer = CharLevelTokenizer()
    stream = Stream(tokenizer.detokenize, tokenizer.eod, written.append)
    seen = []
    for token in (*"aé€".encode(), 0xE2, tokenizer.eod):
        stream.add(Step(0, [0], [token], [False]))
        seen.append("".join(written))
    assert seen == ["a", "a", "aé", "aé", "aé", "aé€", "aé€", "aé€"]
    stream.finish()
    assert "".join(written) == "aé€\N{REPLACEMENT CHARACTER}"
