"""Functions as the worker calls them: from completions to rewards and what is wrong with these."""

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

from megatron.rollouts.rewards.programs import NoIsolation
from megatron.rollouts.rewards.verifiers import VERIFIERS

# From completions `[prompt, completion, completion_ids, columns, messages]` to each one's reward and problem.
Function = Callable[[list[Any]], list[tuple[float | None, str | None]]]
_OURS = ("prompt", "completion", "completion_ids")  # are handed on by other names, as in TRL


class NotUsable(Exception):
    """A function that cannot be called; the message says why."""


def load_file(file: str, name: str) -> Function:
    """A user's function. Raises NotUsable, or what the file raises."""
    function = _function(file, name)
    if not _takes_columns(function):
        raise NotUsable(f"{name} takes only some columns; declare it as {name}(prompts, completions, **kwargs)")

    def judge(completions: list[Any]) -> list[tuple[float | None, str | None]]:
        return _checked(_given(function(**trl_arguments(completions))), len(completions))

    return judge


def load_judge(file: str, name: str) -> Function:
    """A user's pairwise judge, a function of prompts and pairs of texts, and columns besides where it
    declares `**kwargs`: of a pair it gives the place of the better completion, 0 or 1, and -1 or None for no
    verdict. Raises NotUsable, or what the file raises."""
    function = _function(file, name)
    with_columns = _takes_columns(function)
    try:
        if not with_columns:
            inspect.signature(function).bind(prompts=[], completions=[])
    except TypeError as problem:
        raise NotUsable(f"{name}: {problem}; declare it as {name}(prompts, completions)") from None

    def judge(pairs: list[Any]) -> list[tuple[float | None, str | None]]:
        all_columns = [columns for _, _, _, columns, _ in pairs]
        names = {name for columns in all_columns for name in columns if name not in _OURS} if with_columns else ()
        verdicts = function(
            prompts=[prompt for prompt, *_ in pairs],
            completions=[list(two) for _, two, *_ in pairs],
            **{name: [columns.get(name) for columns in all_columns] for name in names},
        )
        return [_verdict(*one) for one in _checked(_given(verdicts), len(pairs))]

    return judge


def load_verifier(name: str, timeout_s: float, hidden: Sequence[str]) -> Function:
    """A verifier of ours, made ready. hidden: folders that no program may see. Raises what keeps it from
    working here."""
    verifier = VERIFIERS[name]
    verify = verifier.prepare(timeout_s, hidden)

    def judge(completions: list[Any]) -> list[tuple[float | None, str | None]]:
        judged: list[tuple[float | None, str | None]] = []
        for _, completion, _, columns, _ in completions:
            there = any(columns.get(column) is not None for column in verifier.columns)
            judged.append((verify(completion, columns) if there else None, None))
        return judged

    return judge


def reason(problem: BaseException) -> str:
    """An exception in one line, with the place in the user's code."""
    if isinstance(problem, NotUsable | NoIsolation):
        return str(problem)
    text = str(problem).strip().splitlines()
    said = f"{type(problem).__name__}: {text[0]}" if text else type(problem).__name__
    frames = traceback.extract_tb(problem.__traceback__)
    ours = str(Path(__file__).parents[1])
    place = next((frame for frame in reversed(frames) if not frame.filename.startswith((ours, "<"))), None)
    return f"{said} ({Path(place.filename).name}:{place.lineno})" if place else said


def load_module(path: Path) -> ModuleType:
    """The module of a file; the functions of one file share it. It finds modules that lie beside it or in the
    folder that the run was started in."""
    name = f"user_file:{path}"  # two folders may have files of one name
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise NotUsable(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NotUsable(f"{path} is no Python file")
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
    """What TRL hands a reward function; a column that some rows lack is None there."""
    names = {name: None for _, _, _, columns, _ in completions for name in columns if name not in _OURS}
    return {
        "prompts": [prompt for prompt, *_ in completions],
        "completions": [
            messages or (text if isinstance(prompt, str) else [{"role": "assistant", "content": text}])
            for prompt, text, _, _, messages in completions
        ],
        "completion_ids": [ids for _, _, ids, *_ in completions],
        **{name: [columns.get(name) for _, _, _, columns, _ in completions] for name in names},
    }


async def _awaited(rewards: Any) -> Any:
    return await rewards


def _function(file: str, name: str) -> Callable[..., Any]:
    module = load_module(Path(file))
    if not hasattr(module, name):
        raise NotUsable(f"{file} has no function {name}")
    function = getattr(module, name)
    if not callable(function):
        raise NotUsable(f"{name} is no function")
    return function


def _takes_columns(function: Callable[..., Any]) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())


def _given(values: Any) -> Any:
    """What a function gave, which may have to be awaited."""
    if inspect.isawaitable(values):
        import asyncio  # half of what the worker would import

        return asyncio.run(_awaited(values))
    return values


def _verdict(value: float | None, problem: str | None) -> tuple[float | None, str | None]:
    if value is None or value in (0.0, 1.0):
        return value, problem
    return None, None if value == -1.0 else f"returned {value:g}, no verdict (0, 1, or -1 for none)"


def _checked(rewards: Any, number: int) -> list[tuple[float | None, str | None]]:
    """The rewards that a user's function returned, as numbers of Python."""
    if isinstance(rewards, str | bytes | dict) or not hasattr(rewards, "__iter__"):
        problem = f"returned {short(rewards)}, no list of numbers"
        return [(None, problem)] * number
    rewards = list(rewards)
    if len(rewards) != number:
        return [(None, f"returned {len(rewards)} values for {number} completions")] * number
    return [number_of(reward) for reward in rewards]


def number_of(reward: Any) -> tuple[float | None, str | None]:
    """A reward as a number of Python, or why it is none; None for one that is None."""
    if reward is None:
        return None, None
    try:
        value = None if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):  # of a tensor with several elements too
        value = None
    if value is None:
        return None, f"returned {short(reward)}, no number"
    return (value, None) if math.isfinite(value) else (None, f"returned {'NaN' if value != value else value}")


def short(value: Any) -> str:
    """A value in one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
