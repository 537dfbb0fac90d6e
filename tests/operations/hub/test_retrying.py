"""Retries and waits on answers of a Hub, through huggingface_hub's client."""

import email.utils
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from megatron.operations.hub.errors import HubError
from megatron.operations.hub.retrying import Patience, call, one_line, watch_answers
from tests.operations.hub.loopback_hub import TOKEN, LoopbackHub, Repo

USUAL = Patience()
Ask = Callable[..., list[str]]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits, none of which is waited for."""
    durations: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", durations.append)
    return durations


@pytest.fixture
def ask(client: None, hub: LoopbackHub, waits: list[float]) -> Ask:
    hub.repos["org/run"] = Repo()

    def list_refs(patience: Patience = USUAL) -> list[str]:
        messages: list[str] = []
        watch_answers()
        call(patience, "listing", lambda: HfApi().list_repo_refs("org/run"), messages.append)
        return messages

    return list_refs


def test_waits_double_up_to_the_longest(ask: Ask, hub: LoopbackHub, waits: list[float]) -> None:
    hub.fail("GET .*/refs", 503, times=7)
    messages = ask()
    assert waits == [120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    assert re.match(r"listing: .*503 .*GET /api/models/org/run/refs.* 120 s \(.*1 of 20\)", messages[0])
    assert len(hub.requests_matching("refs")) == 8, "none is tried by the client itself"


def test_the_hub_says_when(ask: Ask, hub: LoopbackHub, waits: list[float]) -> None:
    hub.fail("GET .*/refs", 429, retry_after="7")
    hub.fail("GET .*/refs", 429, retry_after=email.utils.formatdate(time.time() + 90, usegmt=True))
    assert "in 7 s, as the Hub says (retry 1 of 20)" in ask()[0]
    assert waits[0] == 7.0 and 0 < waits[1] <= 90, "not the 120 s of its own"


@pytest.mark.parametrize(
    "header", ["31536000", "9" * 400, "Fri, 01 Jan 2100 00:00:00 -0000", "Fri, 31 Dec 9999 23:59:59 -2359"]
)
def test_no_answer_is_slept_for_longer_than_asked_for(
    ask: Ask, hub: LoopbackHub, waits: list[float], header: str
) -> None:
    hub.fail("GET .*/refs", 429, retry_after=header)
    assert "in 50 s (--retry-max-wait), although the Hub says" in ask(Patience(3, 10.0, 50.0))[0]
    assert waits == [50.0]


def test_after_the_last_try_it_says_how_to_go_on(ask: Ask, hub: LoopbackHub) -> None:
    hub.fail("GET .*/refs", 429, times=3)
    with pytest.raises(HubError, match="429 .* 2 retries"):
        ask(Patience(2, 1.0, 2.0))
    assert len(hub.requests_matching("refs")) == 3


def test_a_connection_that_breaks(ask: Ask, hub: LoopbackHub, waits: list[float]) -> None:
    hub.fail("GET .*/refs", "lost")
    assert "listing: " in ask()[0] and waits == [120.0]


@pytest.mark.parametrize(("status", "advice"), [
    (401, "rejects the token .401.; set HF_TOKEN"), (403, "token may not do this .403."), (404, "no such repository"),
])  # fmt: skip
def test_what_stays_is_tried_once(ask: Ask, hub: LoopbackHub, waits: list[float], status: int, advice: str) -> None:
    hub.fail("GET .*/refs", status)
    with pytest.raises(HubError, match=advice) as raised:
        ask()
    assert not waits and "\n" not in str(raised.value) and TOKEN not in str(raised.value)


@pytest.mark.parametrize("place", ["variable", "file"])
def test_signatures_and_the_token_are_not_printed(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if place == "variable":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    else:  # of `hf auth login`
        (tmp_path / "token").write_text(TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    problem = RuntimeError(f"no answer\nfrom https://store/a/b?X-Amz-Signature=abc, {TOKEN}")
    assert one_line(problem) == "no answer from https://store/a/b ***"
