"""Progress of long work: a bar in a terminal, which is erased, and elsewhere a line every ten seconds."""

import logging
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from megatron.process import progress
from megatron.process.progress import ProgressBar
from megatron.training import train
from tests.launch.runs import ROOT
from tests.pool import run_ranks
from tests.training.runs import LLAMA, begin, config


class Lines(logging.Logger):
    def __init__(self) -> None:
        super().__init__("lines")
        self.lines: list[str] = []

    def info(self, text: object, *arguments: Any, **options: Any) -> None:
        self.lines.append(str(text))


def test_lines_say_the_share_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], Lines()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with ProgressBar("saving", 1000, "MB", log, visible=True) as bar:
        for now[0], done in ((9.0, 90), (11.0, 110), (12.0, 120), (40.0, 400)):
            bar.advance_to(done)
    assert log.lines == [
        "saving:  11%| 110 of 1000 MB, 10.0 a second, 01:29 left",
        "saving:  40%| 400 of 1000 MB, 10.0 a second, 01:00 left",
    ]


BAR = """
import logging, sys, time
from megatron.process.progress import ProgressBar
with ProgressBar("building index maps", 5, "dataset", logging.getLogger(), visible=True, transient=True) as bar:
    for done in range(6):
        time.sleep(float(sys.argv[1]))
        bar.advance_to(done)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.4])
def test_a_transient_bar_is_erased(seconds: float) -> None:
    """Short work shows none."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    with subprocess.Popen([sys.executable, "-c", BAR, str(seconds)], stderr=end, cwd=ROOT) as child:
        os.close(end)
        output = b""
        while piece := _read(terminal):
            output += piece
    os.close(terminal)
    assert child.returncode == 0
    drafts = output.decode().split("\r")
    drawn_bars = [draft for draft in drafts if re.search(r"building index maps: +\d+%.*<0", draft)]
    assert bool(drawn_bars) == (seconds > 0), drafts
    assert not drafts[-1].strip()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the child has ended
        return b""


def saved(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[int, int]]:
    """For the pool: (MB done, MB in all) as the save after a step tells them."""
    training, reports = begin(values), list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressBar, "advance_to", lambda bar, done: reports.append((done, bar.total)))
        train(training)
    training.engine.close()
    return reports


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_tells_how_far_it_is(in_background: bool, tmp_path: Path) -> None:
    keys = {"hidden_size": 256, "num_attention_heads": 4, "num_kv_heads": 2, "intermediate_size": 768, "num_layers": 4}
    values = config(LLAMA, keys, save=str(tmp_path), async_save=in_background, checkpoint_factor=1, train_iters=1)
    reports = run_ranks(saved, 1, values)[0]
    if not in_background:  # such a save may be over before anybody waits
        shares = [done / total for done, total in reports]
        assert len(reports) > 6 and shares == sorted(shares) and shares[0] < 0.5 and shares[-1] > 0.9
