"""Uploads by huggingface_hub's own client to a Hub on this machine."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.operations.hub.conversion import convert
from tests.operations.hub.conftest import COMMAND, ROOT
from tests.operations.hub.loopback_hub import TOKEN, LoopbackHub

Upload = Callable[..., subprocess.CompletedProcess[str]]
MODEL, NEOX = "org/tiny-run", "org/neox-ckpt-tiny-run"
STEPS = [f"global_step{step}" for step in (5, 4, 3, 2, 1)]


def journal(save: Path, tag: str) -> list[dict]:
    return [json.loads(line) for line in (save / "hub" / f"{tag}.jsonl").read_text().splitlines()]


def converted(save: Path, tag: str, folder: Path) -> dict[str, bytes]:
    convert(save / tag, folder)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_no_token(*places: Path) -> None:
    read = 0
    for place in places:
        for path in (path for path in place.rglob("*") if path.is_file()):
            data = path.read_bytes()
            assert TOKEN.encode() not in data and b"X-Signature" not in data, path
            read += 1
    assert read


def test_one_checkpoint_in_both_formats(save: Path, hub: LoopbackHub, upload: Upload, tmp_path: Path) -> None:
    """Busy twice, cut within a file, an answer lost: one commit each, every object once, and again nothing."""
    hub.fail(r"POST .*/commit/", 429, times=2, retry_after="1")
    hub.fail(r"PUT .*", "cut")
    words = ("--hf_org", "org", "--neox_checkpoint", "global_step5")
    done = upload(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("answered 429") == 2 and "tried again in 1 s, as the Hub says (2 of 20)" in done.stdout
    waited = hub.asked("POST .*/commit/")
    assert waited[1].at - waited[0].at >= 1.0 and waited[2].at - waited[1].at >= 1.0
    assert {name: repo.commits for name, repo in hub.repos.items()} == {
        MODEL: {"main": ["global_step5 of tiny=run"]}, NEOX: {"main": ["global_step5 of tiny=run"]},
    }  # fmt: skip
    assert hub.content(MODEL, "global_step5") == hub.content(MODEL, "main") == converted(
        save, "global_step5", tmp_path / "again"
    )
    neox = hub.content(NEOX, "main")
    assert {name for name in neox if "/" not in name} == {"latest", "README.md"}
    assert neox["latest"] == b"global_step5\n"
    for path in (path for path in (save / "global_step5").rglob("*") if path.is_file()):
        assert neox[path.relative_to(save).as_posix()] == path.read_bytes()
    assert len(hub.puts) == len(set(hub.puts)) == len(hub.objects)
    assert not (save / "hub" / "global_step5").exists()
    events = [line["event"] for line in journal(save, "global_step5")]
    assert events[0] == "converted" and events[-1] == "finished" and events.count("published") == 4

    sent, commits = len(hub.puts), len(hub.asked("POST .*/commit/"))
    again = upload(*words)
    assert again.returncode == 0 and "has it already" in again.stdout and "converting" not in again.stdout
    assert (len(hub.puts), len(hub.asked("POST .*/commit/"))) == (sent, commits)
    assert TOKEN not in done.stdout + done.stderr + again.stdout + again.stderr
    assert_no_token(save / "hub")
    check_card(hub.content(MODEL, "main"))


def check_card(files: dict[str, bytes]) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "transformers" and "gpt-neox" in card.data.tags
    assert "| hidden_size | 128 |" in card.text and "1,280 tokens seen" in card.text
    assert "sha256" in card.text and "curves.png" in card.text
    assert files["curves.png"].startswith(b"\x89PNG")
    assert json.loads(files["training_config.json"])["train_iters"] == 5
