"""Loads reward functions and judges in the worker process, and calls them.

Each completion gets a pair (reward, problem): the problem says why there is no reward, else it is None.
"""

import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.methods.reinforcement.rewards.programs import NoIsolation
from megatron.methods.reinforcement.rewards.verifiers import VERIFIERS

# Maps a list of completions `[prompt, completion, completion_ids, columns, messages]` to a (reward, problem)
# for each completion.
Function = Callable[[list[Any]], list[tuple[float | None, str | None]]]
_RENAMED_COLUMNS = ("prompt", "completion", "completion_ids")  # passed to functions in the plural, as in TRL


class NotUsable(Exception):
    """Raised if a user's function or class cannot be used; the message says why."""


def load_file(file: str, name: str) -> Function:
    """Loads the reward function `name` of a user's file.

    Returns a function from completions to a (reward, problem) for each. Raises NotUsable if the function is
    missing or takes no `**kwargs`, and any exception of the user's file.
    """
    function = _function(file, name)
    if not _takes_columns(function):
        raise NotUsable(
            f"reward function {name} has no **kwargs for columns, the other fields of prompts; declare it as "
            f"{name}(prompts, completions, **kwargs)"
        )

    def judge(completions: list[Any]) -> list[tuple[float | None, str | None]]:
        return _checked(_awaited_result(function(**trl_arguments(completions))), len(completions))

    return judge


def load_judge(file: str, name: str) -> Function:
    """Loads the pairwise judge `name` of a user's file: a function of prompts and pairs of completions.

    For each pair it must return the index of the better completion (0 or 1), or -1 or None for no verdict. If
    it declares `**kwargs` it also gets columns. Raises NotUsable, or the exception of the user's file.
    """
    function = _function(file, name)
    with_columns = _takes_columns(function)
    try:
        if not with_columns:
            inspect.signature(function).bind(prompts=[], completions=[])
    except TypeError as problem:
        raise NotUsable(
            f"judge {name} does not take the arguments prompts and completions ({problem}); declare it as "
            f"{name}(prompts, completions)"
        ) from None

    def judge(pairs: list[Any]) -> list[tuple[float | None, str | None]]:
        verdicts = function(
            prompts=[prompt for prompt, *_ in pairs],
            completions=[list(texts) for _, texts, *_ in pairs],
            **(_columns(pairs) if with_columns else {}),
        )
        return [_verdict(*judged) for judged in _checked(_awaited_result(verdicts), len(pairs))]

    return judge


def load_verifier(name: str, timeout_s: float, hidden: Sequence[str]) -> Function:
    """Prepares a built-in verifier. Returns a function from completions to a (reward, problem) for each.

    timeout_s: time limit for one program that a model wrote. hidden: folders that such programs may not see.
        Raises an exception if the verifier cannot work on this machine.
    """
    verifier = VERIFIERS[name]
    verify = verifier.prepare(timeout_s, hidden)

    def judge(completions: list[Any]) -> list[tuple[float | None, str | None]]:
        judged: list[tuple[float | None, str | None]] = []
        for _, completion, _, columns, _ in completions:
            has_column = any(columns.get(column) is not None for column in verifier.columns)
            judged.append((verify(completion, columns) if has_column else None, None))
        return judged

    return judge


def reason(problem: BaseException) -> str:
    """Describes an exception in one line, with the file and line of the user's code that raised it."""
    if isinstance(problem, NotUsable | NoIsolation):
        return str(problem)
    text = str(problem).strip().splitlines()
    description = f"{type(problem).__name__}: {text[0]}" if text else type(problem).__name__
    frames = traceback.extract_tb(problem.__traceback__)
    room = str(Path(__file__).parents[1])
    place = next((frame for frame in reversed(frames) if not frame.filename.startswith((room, "<"))), None)
    return f"{description} ({Path(place.filename).name}:{place.lineno})" if place else description


def load_module(path: Path) -> ModuleType:
    """Imports a Python file, at most once, and returns its module.

    The file can import modules from its own folder and from the working directory. Raises NotUsable if there
    is no such Python file.
    """
    name = f"user_file:{path}"  # the full path, since two folders may have files of the same name
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise NotUsable(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NotUsable(f"{path} is not a Python file; give FILE.py")
    module = importlib.util.module_from_spec(spec)
    sys.path += [str(path.parent), os.getcwd()]
    sys.modules[name] = module  # dataclasses and pickles of the file look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def trl_arguments(completions: list[Any]) -> dict[str, list[Any]]:
    """Returns the keyword arguments that TRL would pass to a reward function for these completions."""
    return {
        "prompts": [prompt for prompt, *_ in completions],
        "completions": [
            messages or (text if isinstance(prompt, str) else [{"role": "assistant", "content": text}])
            for prompt, text, _, _, messages in completions
        ],
        "completion_ids": [ids for _, _, ids, *_ in completions],
        **_columns(completions),
    }


def _columns(completions: list[Any]) -> dict[str, list[Any]]:
    """Returns the other fields of the prompts, by name: a list with one value per completion, None where it
    is missing."""
    names = {name: None for _, _, _, columns, _ in completions for name in columns if name not in _RENAMED_COLUMNS}
    return {name: [columns.get(name) for _, _, _, columns, _ in completions] for name in names}


def _function(file: str, name: str) -> Callable[..., Any]:
    module = load_module(Path(file))
    if not hasattr(module, name):
        raise NotUsable(f"{file} has no function {name}")
    function = getattr(module, name)
    if not callable(function):
        raise NotUsable(f"{name} is not a function; name one that can be called")
    return function


def _takes_columns(function: Callable[..., Any]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values())


def _awaited_result(values: Any) -> Any:
    """Returns `values`, or, if it is a coroutine of an async function, the result of running it."""
    if inspect.isawaitable(values):
        import asyncio  # imported late: it takes as long as all other imports of the worker

        async def awaited() -> Any:
            return await values

        return asyncio.run(awaited())
    return values


def _verdict(value: float | None, problem: str | None) -> tuple[float | None, str | None]:
    if value is None or value in (0.0, 1.0):
        return value, problem
    return None, None if value == -1.0 else f"returned {value:g}, not a verdict (0, 1, or -1 or None for no verdict)"


def _checked(rewards: Any, number: int) -> list[tuple[float | None, str | None]]:
    """Converts the return value of a user's function to `number` pairs (reward, problem).

    problem: says why a value is not a reward; else None.
    """
    if isinstance(rewards, str | bytes | dict) or not hasattr(rewards, "__iter__"):
        return [(None, f"returned {short(rewards)}, not a list of numbers")] * number
    rewards = list(rewards)
    if len(rewards) != number:
        return [(None, f"returned {len(rewards)} values for {number} completions, not one for each")] * number
    return [number_of(reward) for reward in rewards]


def number_of(reward: Any) -> tuple[float | None, str | None]:
    """Converts a value to a (reward, problem): (reward, None) for a finite number, else (None, why it is
    none).

    None stands for "no reward", and becomes (None, None).
    """
    if reward is None:
        return None, None
    try:
        value = None if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):  # of a tensor with several elements too
        value = None
    if value is None:
        return None, f"returned {short(reward)}, not a number"
    return (value, None) if math.isfinite(value) else (None, f"returned {'NaN' if value != value else value}")


def short(value: Any) -> str:
    """Returns the repr of a value in one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
