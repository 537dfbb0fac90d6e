"""Lines for a log file, and lines for a terminal."""

import io
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from megatron.process.terminal import (
    TERMINAL_LOG,
    OutputSplitter,
    coloured,
    for_log_file,
    for_terminal,
)


@pytest.fixture
def in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TERMINAL_LOG, "logs/rank_0.log")


def split(pieces: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Returns all text for the file, and all text for the terminal."""
    splitter = OutputSplitter()
    logged, screen = zip(*map(splitter.feed, pieces), strict=True)
    return b"".join(logged) + splitter.finish(), b"".join(screen)


def test_lines_of_each_kind(in_terminal: None) -> None:
    text = ["both", for_log_file("long\n  longer"), for_terminal("short"), "both again", "not ended"]
    logged, screen = split(["\n".join(text).encode()])
    assert logged == b"both\nlong\n  longer\nboth again\nnot ended"
    assert screen == b"both\nshort\nboth again\nnot ended"


def test_elsewhere_lines_are_not_marked() -> None:
    assert for_log_file("long\n  longer") == "long\n  longer"


def run_with_bar(stream: io.StringIO) -> None:
    """A bar, and lines while it is there: for the file alone, for the terminal alone, for both."""
    bar = tqdm(total=3, file=stream, ascii=True, miniters=1, mininterval=0, bar_format="step {n_fmt} {desc}")
    for number in range(3):
        bar.set_description_str(coloured(f"loss {number}", 32), refresh=False)
        with bar.external_write_mode(file=stream):
            for line in (for_log_file(f"iteration {number}"), for_terminal(f"validation {number}"), f"saved {number}"):
                stream.write(f"{line}\n")
        bar.update()
    bar.close()


def test_bars_are_not_in_the_file(in_terminal: None) -> None:
    stream = io.StringIO()
    run_with_bar(stream)
    logged, screen = split([stream.getvalue().encode()])
    lines = logged.decode().splitlines()
    assert lines[:-1] == [f"{word} {n}" for n in range(3) for word in ("iteration", "saved")]
    assert lines[-1] == "step 3 loss 2"  # as the bar stood at the end
    assert b"\x1b" not in logged and b"\r" not in logged
    assert b"iteration" not in screen and screen.count(b"validation 1\n") == 1 and b"\x1b[32mloss 2" in screen


@given(st.lists(st.integers(1, 40), max_size=60))
def test_how_output_arrives_changes_nothing(sizes: list[int]) -> None:
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TERMINAL_LOG, "logs/rank_0.log")
        run_with_bar(stream)
    data = stream.getvalue().encode()
    pieces, remaining = [], data
    for size in sizes:
        pieces, remaining = [*pieces, remaining[:size]], remaining[size:]
    assert split([*pieces, remaining]) == split([data])


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("a", 32) == "\x1b[32ma\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("a", 32) == "a"
    assert not re.search("[\x0e\x0f]", coloured("a", 32))
