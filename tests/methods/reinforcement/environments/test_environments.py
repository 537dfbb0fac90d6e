"""Environments of the user's in processes of their own: no failure of one reaches another."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from megatron.methods.reinforcement.environments.environments import (
    Environment,
    EnvironmentFailure,
    Environments,
    Outcome,
)
from megatron.methods.reinforcement.rewards.functions import RewardError
from tests.launch.runs import alive, wait_for

FILE = Path(__file__).with_name("user_environments.py")
Open = Callable[[str], Environment]


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, Environments]]:
    """Environments by the name of their class, each started once for all tests."""
    environments: dict[str, Environments] = {}
    yield environments
    for environment in environments.values():
        environment.close()


@pytest.fixture
def start(opened: dict[str, Environments]) -> Open:
    def with_name(name: str) -> Environment:
        if name not in opened:
            hangs = name in ("Misbehaves", "Closes")
            opened[name] = Environments(f"{FILE}:{name}", timeout_s=1.0 if hangs else 60.0, workers=4)
            opened[name].check()
        return opened[name].open()

    return with_name


def test_conversations_share_nothing(start: Open) -> None:
    with closing(start("Echo")) as second_echo:
        with closing(start("Echo")) as first_echo:
            assert first_echo.reset("p", 1, {"steps": 3}) == " (1)"
            assert second_echo.reset("p", 2, {}) == " (1)", "what the module holds is each conversation's own"
            assert (first_echo.step("a"), second_echo.step("x")) == (Outcome("a", 0.5, False), Outcome("x", 0.5, False))
            assert (first_echo.step("b\n"), second_echo.step("y")) == (
                Outcome("a/b\n", 0.5, False),
                Outcome("x/y", 0.5, True),
            )
        assert second_echo.step("z").observation == "x/y/z", "one's end is not the other's"


def test_draws_are_the_seed_s(start: Open) -> None:
    def draw(seed: int) -> str:
        with closing(start("Draws")) as environment:
            return str(environment.reset("p", seed, {}))

    assert draw(5) == draw(5) != draw(6)


@pytest.mark.parametrize(("command", "reason"), [
    ("raise", r"ValueError: no such move \(user_environments.py:\d+\)"),
    ("hang", "took longer than 1 s"),
    ("exit", r"SystemExit: 3 \(user_environments.py:\d+\)"),
    ("die", "its process ended"),
    ("pair", r"step returned \('a', 1.0\), not \(observation, reward, done\)"),
    ("nan", r"step returned NaN \(as reward\).*"),
    ("text", r"step returned '1', not a number \(as reward\).*"),
    ("nothing", "step returned no observation, but done is false; return a text, or done=True"),
    ("set", r"step returned \{1\} as observation, .* messages"),
    ("roles", r"step returned \[\{'content': 'a'\}\] as observation, .* messages"),
    ("model", "step returned .* role assistant.* such as user"),
    ("bytes", r"step returned '\\udcff', which is not valid Unicode; decode bytes with errors='replace'"),
    ("writes", "its process sent .*observation.* descriptor.*"),
    ("other", r"KeyError: 'other' \(user_environments.py:\d+\)"),
])  # fmt: skip
def test_a_failure_is_named_and_its_own(command: str, reason: str, start: Open) -> None:
    """A step fails, and so does a reset that takes a step."""
    with closing(start("Misbehaves")) as bad, closing(start("Misbehaves")) as good:
        good.reset("p", 1, {})
        if command == "raise":
            with pytest.raises(EnvironmentFailure, match=reason):
                bad.reset("p", 1, {"starts": command})
        bad.reset("p", 1, {})
        with pytest.raises(EnvironmentFailure, match=f"^{reason}$"):
            bad.step(command)
        assert good.step("fine") == Outcome("a", None, False)


def test_it_is_given_tokens_and_is_closed_if_it_answers(start: Open, tmp_path: Path) -> None:
    file = tmp_path / "given"
    environment = start("Closes")
    environment.reset("p", 1, {"file": str(file)})
    environment.step("a", [5, 6])
    environment.finish()
    environment.close()
    assert file.read_text() == "[['a', [5, 6]]]"
    file.unlink()
    hanging = start("Closes")
    hanging.reset("p", 1, {"file": str(file)})
    with pytest.raises(EnvironmentFailure, match="took longer"):
        hanging.step("hang", [])
    hanging.finish()
    hanging.close()
    hanging.close()
    assert not file.exists()


def test_conversations_need_files(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError(24, "Too many open files")

    with closing(start("Echo")):
        monkeypatch.setattr(socket, "socketpair", none_left)
        with pytest.raises(EnvironmentFailure, match="Too many open files.*ulimit -Hn"):
            start("Echo")


def test_a_host_that_is_killed_is_started_again(opened: dict[str, Environments], start: Open) -> None:
    environment = start("Echo")
    environment.reset("p", 1, {})
    host = opened["Echo"]._host
    assert host is not None
    host._process.kill()
    host._process.wait()
    with pytest.raises(EnvironmentFailure, match="its process ended"):
        while environment.step("a"):  # until its keeper finds itself alone
            time.sleep(0.05)
    environment.close()
    with start("Echo")._messages._socket:  # another host answers
        assert opened["Echo"]._host is not host


def test_many_at_a_time(start: Open) -> None:
    def held(number: int) -> str:
        with closing(start("Echo")) as environment:
            environment.reset("p", number, {})
            return str(environment.step(str(number)).observation)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(held, range(100))) == [str(number) for number in range(100)]


@pytest.mark.parametrize(("entry", "reason"), [
    ("Echo", "Echo: .*FILE.py:CLASS"),
    (f"{FILE}:Nothing", "no class Nothing"),
    (f"{FILE.with_name('nowhere.py')}:Echo", "nowhere.py: no such file"),
    (f"{FILE}:Picky", r"reset\(self, prompt, seed, \*\*columns\)"),
    (f"{FILE}:Waits", "Waits.reset is async"),
    (f"{FILE}:NoStep", r"no method step\(self, completion\)"),
    (f"{FILE}:Echo", "field seed"),  # which is its own name
])  # fmt: skip
def test_what_is_no_environment_is_refused_before_anything(entry: str, reason: str) -> None:
    with ExitStack() as opened, pytest.raises(RewardError, match=reason):
        environments = opened.enter_context(closing(Environments(entry, timeout_s=60.0, workers=1)))
        environments.check({"answer", "seed"} if reason == "field seed" else {"answer"})


def test_nothing_is_left_of_a_run() -> None:
    """Processes that an environment started end with it, or with all environments."""
    environments = Environments(f"{FILE}:Misbehaves", timeout_s=1.0, workers=1)
    for closed in (Environment.close, lambda _: environments.close()):
        environment = environments.open()
        environment.reset("p", 1, {})
        child = int(str(environment.step("child").observation))
        assert alive(child)
        closed(environment)
        wait_for(lambda child=child: not alive(child))
    with pytest.raises(EnvironmentFailure, match="the run ends"):
        environments.open()
