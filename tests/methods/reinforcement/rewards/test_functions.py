"""Users' reward functions: what they are given, and that no failure of theirs reaches other rewards."""

import ast
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron.methods.reinforcement.rewards.calls import trl_arguments
from megatron.methods.reinforcement.rewards.functions import Completion, Failure, RewardError, RewardFunctions, Scores
from megatron.methods.reinforcement.rewards.lane import is_verdict
from megatron.methods.reinforcement.rewards.worker_process import environment
from tests.launch.runs import alive, wait_for

FILE = Path(__file__).with_name("user_functions.py")
Score = Callable[..., Scores]


def rows(values: list[Any], prompt: Any = "p") -> list[Completion]:
    return [Completion(prompt, f"text {row}", [row, 7], {"value": value}) for row, value in enumerate(values)]


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, RewardFunctions]]:
    """Functions by name, each started once for all tests."""
    functions: dict[str, RewardFunctions] = {}
    yield functions
    for reward_functions in functions.values():
        reward_functions.close()


@pytest.fixture
def score(opened: dict[str, RewardFunctions]) -> Score:
    def with_name(name: str, completions: list[Completion]) -> Scores:
        if name not in opened:
            opened[name] = RewardFunctions([f"{FILE}:{name}"], timeout_s=1.0)
            opened[name].check()
        return opened[name].score(completions)

    return with_name


def place(text: str, lines_later: int = 0) -> str:
    """The file and line in which a text stands, or so many lines later."""
    prefix = FILE.read_text().partition(text)[0]
    return f"{FILE.name}:{prefix.count(chr(10)) + 1 + lines_later}"


def trl_function(name: str) -> Any:
    """A method of TRL's GRPO trainer, from its source: importing it takes half a minute."""
    torch, spec = pytest.importorskip("torch"), find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs trl")
    source = (Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    method = next(node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == name)
    space = {"torch": torch, "nn": torch.nn, "is_async_callable": lambda _: False, "gather": lambda rewards: rewards,
             "profiling_context": lambda *_: nullcontext(), "profiling_decorator": lambda method: method,
             "logger": Mock()}  # fmt: skip
    exec(compile(ast.Module([method], []), "grpo_trainer.py", "exec"), space)
    return space[name]


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]])
def test_trl_gives_the_same(prompt: Any) -> None:
    """TRL's own code calls a function that notes what it is given, and so does ours."""
    calls: list[dict[str, Any]] = []
    trainer = Mock(reward_funcs=[lambda **columns: calls.append(columns) or [None, 0.5]], environments=None,
                   reward_processing_classes=[None], reward_func_names=["noted"])  # fmt: skip
    trainer.accelerator.device = "cpu"
    skipped_columns = {"prompt": prompt, "completion_ids": []}  # are not handed on
    columns: list[dict[str, Any]] = [
        {**skipped_columns, "answer": "1", "tags": ["x"]},
        {**skipped_columns, "answer": None, "tags": []},
    ]
    answers: list[Any] = ["a", "b"]
    if prompt != "q":
        answers = [[{"role": "assistant", "content": text}] for text in answers]
    rewards = trl_function("_calculate_rewards")(trainer, columns, [prompt] * 2, answers, [[1], [2, 3]])
    for name in ("trainer_state", "log_extra", "log_metric"):
        del calls[0][name]
    rows = [[prompt, "a", [1], columns[0], None], [prompt, "b", [2, 3], columns[1], None]]
    assert trl_arguments(rows) == calls[0]
    messages = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert trl_arguments([[*rows[0][:4], messages], rows[1]])["completions"] == [messages, answers[1]]
    assert rewards[0].isnan() and rewards[1] == 0.5


def test_prompts_of_both_kinds_and_rows_that_lack_a_column(score: Score) -> None:
    completions = [Completion("p", "a", [1], {"value": 3}), Completion([{"role": "user", "content": "p"}], "b", [], {})]
    assert score("row_values", completions).parts == {"row_values": [3.0, None]}


def test_async_functions_and_numbers_of_other_types(score: Score) -> None:
    assert score("waits", rows([1, 2])).parts == {"waits": [1.5, 1.5]}
    assert score("row_values", rows(["true", 2, None])).parts == {"row_values": [1.0, 2.0, None]}


def test_prints_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(RewardFunctions([f"{FILE}:prints"], timeout_s=100)) as functions:
        result = functions.score(rows([1, 2]))
    assert result.parts == {"prints": [2.0, 2.0]} and result.failures == []
    output = capfd.readouterr()
    assert output.err.count("judged") == 2 and "from a child" in output.err and output.out == ""


@pytest.mark.parametrize(("value", "reason"), [
    ("raise", "KeyError: 'what' ({line})"), ("sys.exit", "SystemExit: enough ({line})"),
    ("hang", "took longer than 1 s"), ("exit", "its process ended with exit code 3"),
    ("segfault", "its process was killed by SIGSEGV"), ("nan", "returned NaN"), ("inf", "returned -inf"),
    ("list", "returned [1.0, 2.0], not a number"), ("12", "returned '12', not a number"),
])  # fmt: skip
def test_a_failure_of_one_row_is_that_rows(score: Score, value: str, reason: str) -> None:
    result = score("row_values", rows([1.0, value, 0.5, None]))
    assert result.parts == {"row_values": [1.0, None, 0.5, None]}
    assert result.failures == [Failure("row_values", 1, reason.format(line=place(f'== "{value}"', 1)))]


@pytest.mark.parametrize(("value", "reason"), [
    ("short", "returned 1 values for 3 completions, not one for each"),
    ("float", "returned 0.5, not a list of numbers"),
    ("text", "returned '12', not a list of numbers"),
    ("dict", "returned {0: 1.0, 1: 1.0, 2: 1.0}, not a list of numbers"),
])  # fmt: skip
def test_what_is_no_list_of_a_number_each_is_a_failure_of_all(score: Score, value: str, reason: str) -> None:
    result = score("batch_value", rows([value] * 3))
    assert result.parts == {"batch_value": [None] * 3}
    assert result.failures == [Failure("batch_value", row, reason) for row in range(3)]


@pytest.mark.parametrize("value", ["raise", "hang", "exit"])
def test_always_hanging_or_dying_is_given_up(score: Score, value: str) -> None:
    result = score("row_values", rows([value] * 100))
    assert result.parts["row_values"] == [None] * 100 and len(result.failures) == 100
    given_up = [failure.row for failure in result.failures if failure.reason.startswith("not tried")]
    assert given_up == ([] if value == "raise" else list(range(4, 100)))
    assert score("row_values", rows([1.0])).parts["row_values"] == [1.0]


def test_only_the_call_for_all_fails(score: Score) -> None:
    result = score("only_one", rows([1, 1]))
    assert result.parts == {"only_one": [6.0, 6.0]}
    (failure,) = result.failures
    assert failure.row is None and failure.reason.startswith("ValueError: too many values to unpack (expected 1)")
    assert f"({place('(text,)')})" in failure.reason and "all 2 completions" in failure.reason


def test_slow_rows_have_a_limit_together(score: Score) -> None:
    result = score("slow", rows([1] * 40))
    rewards = result.parts["slow"]
    num_scored = rewards.count(1.0)
    assert 1 <= num_scored <= 11 and rewards == [1.0] * num_scored + [None] * (40 - num_scored)
    assert [failure.row for failure in result.failures] == list(range(num_scored, 40))
    assert score("slow", rows([1])).parts["slow"] == [1.0]


def test_other_functions_keep_their_rewards() -> None:
    completions = [Completion("p", "four", [], {"value": value, "answer": "four"}) for value in (1.0, "exit", 2.0)]
    entries = [f"{FILE}:row_values", f"{FILE}:length", "exact_match"]
    with closing(RewardFunctions(entries, timeout_s=100, workers=2)) as functions:
        result = functions.score(completions)
    assert result.parts == {"row_values": [1.0, None, 2.0], "length": [4.0] * 3, "exact_match": [1.0] * 3}
    assert result.total([1.0, 0.5, 2.0]) == [5.0, 4.0, 6.0]
    scores = Scores({"a": [1.0, None, None], "b": [None, None, 0.0]}, [])
    assert scores.total([2.0, 3.0]) == [2.0, None, 0.0]
    with pytest.raises(ValueError, match="1 weights for 2 "):
        scores.total([1.0])


@pytest.mark.parametrize(
    "text", ['{"judged": [[1.0, null], [1.0, null]]}\n', '{"judged"', "\n", "[" * 50_000 + "\n", '{"problem": null}\n']
)
def test_what_a_function_writes_to_all_descriptors_is_no_answer(text: str) -> None:
    """The function loses its own reward, and no answer moves to another function."""
    completions = rows([text, text])
    with closing(RewardFunctions([f"{FILE}:writes", f"{FILE}:length"], timeout_s=100)) as functions:
        result = functions.score(completions)
    assert result.parts == {"writes": [None, None], "length": [6.0, 6.0]}
    assert [failure.row for failure in result.failures] == [0, 1] and all(
        "descriptor" in failure.reason for failure in result.failures
    )


@pytest.mark.parametrize(
    "answer",
    [{"judged": [[1.0, None]]}, {"judged": [[1.0, None], [math.nan, None]]}, {"judged": [[1.0, None], [True, None]]},
     {"judged": [[1.0, None], [1.0, 2]]}, {"judged": [[1.0, None], [1.0]]}, {"judged": None}, {"raised": 1}, {},
     {"judged": [[1.0, None], [0, "a"]], "raised": "b"}],
)  # fmt: skip
def test_answers_of_another_form_are_none(answer: dict[str, Any]) -> None:
    assert not is_verdict(answer, 2)
    assert is_verdict({"judged": [[1.0, None], [0, "a"]]}, 2) and is_verdict({"raised": "b"}, 2)


def test_only_listed_variables_are_passed() -> None:
    variables = {
        "PATH": "p", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "HF_HOME": "h", "HTTPS_PROXY": "http://proxy:1",
        "https_proxy": "http://me:secret@proxy:1", "HF_TOKEN": "t", "WANDB_API_KEY": "t", "NEOX_SERVE_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "t", "OPENAI_API_KEY": "t", "RANK": "0", "MASTER_ADDR": "a", "SLURM_PROCID": "0",
    }  # fmt: skip
    passed = environment(variables, ["OPENAI_API_KEY"])
    set_by_worker = {"CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONUNBUFFERED"}
    allowed = {"PATH", "LC_ALL", "OMP_NUM_THREADS", "HF_HOME", "HTTPS_PROXY", "OPENAI_API_KEY"}
    assert passed.keys() == allowed | set_by_worker and passed["CUDA_VISIBLE_DEVICES"] == ""


def test_thousand_completions_are_one_call(score: Score) -> None:
    completions = [Completion("p" * 1000, "c" * 2000, list(range(1000)), {}) for _ in range(1000)]
    result = score("num_completions", completions)
    assert result.parts["num_completions"] == [1000.0] * 1000 and result.failures == []
    assert score("num_completions", []).parts == {"num_completions": []}


def test_workers_are_small_and_know_no_rank(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "NEOX_SERVE_TOKEN", "MY_PASSWORD"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = score("environment", rows([1]))
    assert result.failures == [] and result.parts == {"environment": [0.0]}  # 1.0: torch is imported


def test_close_ends_the_worker_and_its_children(score: Score, opened: dict[str, RewardFunctions]) -> None:
    pids = score("process", rows([1, 2])).parts["process"]
    opened["process"].close()
    wait_for(lambda: not any(alive(int(process)) for process in pids))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed"):
        score("process", rows([1]))


def test_a_schedulers_notice_ends_no_worker(score: Score) -> None:
    worker_pids = score("number", rows([1])).parts["number"]
    assert worker_pids[0] is not None
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(int(worker_pids[0]), number)
    assert score("number", rows([1])).parts["number"] == worker_pids
    assert score("pool", rows([1])).parts["pool"] == [4.0]


@pytest.mark.ends_processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(number: signal.Signals) -> None:
    script = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it leaves behind without
from megatron.methods.reinforcement.rewards.functions import Completion, RewardFunctions
functions = RewardFunctions(["{FILE}:spins"], timeout_s=60)
functions.check()
functions.score([Completion("p", "c", [], {{}})])
"""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **streams) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()[1:]]
        assert len(workers) == 2
        parent.send_signal(number)
        assert parent.wait(timeout=200) != 0
        wait_for(lambda: not any(map(alive, workers)))


@pytest.mark.parametrize(("entry", "message"), [
    ("rewards", "rewards: expected FILE.py:NAME or one of arithmetic, code, exact_match, expression, json"),
    (":name", ":name: expected FILE.py:NAME"),
    ("a.py:two words", "a.py:two words: expected FILE.py:NAME"),
    ("nowhere.py:name", "nowhere.py:name: {cwd}/nowhere.py: no such file"),
    ("{file}:nothing", "{file}:nothing: {file} has no function nothing"),
    ("{file}:not_a_function", "{file}:not_a_function: not_a_function is not a function"),
    ("{file}:no_kwargs", "{file}:no_kwargs: reward function no_kwargs has no **kwargs for columns"),
    ("{tmp}/broken.py:f", "{tmp}/broken.py:f: ZeroDivisionError: division by zero (broken.py:2)"),
    ("{tmp}/syntax.py:f", "{tmp}/syntax.py:f: SyntaxError: "),
    ("{tmp}/exits.py:f", "{tmp}/exits.py:f: its process ended with exit code 4"),
])  # fmt: skip
def test_bad_entries_are_refused(entry: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(**kwargs): pass\n1 / 0\n")
    (tmp_path / "syntax.py").write_text("def f(\n")
    (tmp_path / "exits.py").write_text("import os\nos._exit(4)\n")
    names = {"file": FILE, "tmp": tmp_path, "cwd": os.getcwd()}
    with pytest.raises(RewardError) as refused:
        RewardFunctions([entry.format(**names)], timeout_s=1).check()
    assert str(refused.value).startswith(message.format(**names)) and "\n" not in str(refused.value)


@pytest.mark.parametrize("entries", [["a.py:f", "b.py:f"], ["json", "json"], ["json", "a.py:json"]])
def test_two_functions_of_one_name_are_refused(entries: list[str]) -> None:
    with pytest.raises(RewardError, match=f"^{entries[1]}: {entries[0]} "):
        RewardFunctions(entries, timeout_s=1)


def test_functions_of_one_file_share_it_and_find_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text(
        "from beside import VALUE\ncount = 0\n"
        "def one(completions, **kwargs):\n    global count\n    count += 1\n    return [VALUE]\n"
        "def two(completions, **kwargs):\n    return [count]\n"
    )
    with closing(RewardFunctions([f"{tmp_path}/mine.py:one", f"{tmp_path}/mine.py:two"], timeout_s=100)) as functions:
        assert functions.score(rows([1])).parts == {"one": [4.0], "two": [1.0]}
