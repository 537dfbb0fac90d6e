"""The test files that depend on a changed file, nearest first."""

import ast
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Selection:
    """files: test files relative to the root, in the order to run them; arguments: of pytest."""

    files: list[str]
    arguments: tuple[str, ...] = ("-m", "cpu or more")


@cache
def _imported(path: Path) -> frozenset[tuple[str, str | None]]:
    names: set[tuple[str, str | None]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {(node.module, alias.name) for alias in node.names}
    return frozenset(names)


def _file(root: Path, module: str, name: str | None) -> Path | None:
    stem = root.joinpath(*module.split("."))
    places = [stem / f"{name}.py", stem / f"{name}/__init__.py"] if name else []
    for place in [*places, stem.with_suffix(".py"), stem / "__init__.py"]:
        if place.is_file():
            break
    else:
        return None
    if name and place.name == "__init__.py" and place.parent == stem:
        for origin, handed_on in _imported(place):
            if handed_on == name and origin != module:
                return _file(root, origin, name)
    return place


def select(root: Path, changed: list[str]) -> Selection:
    """By the import graph alone."""
    goals = {root / path for path in changed}
    distances = {}
    for test in sorted((root / "tests").rglob("test_*.py")):
        steps, waiting = {test: 0}, deque([test])
        while waiting and not goals & steps.keys():
            here = waiting.popleft()
            for module, name in _imported(here):
                target = _file(root, module, name)
                if target is not None and target not in steps:
                    steps[target] = steps[here] + 1
                    waiting.append(target)
        if found := goals & steps.keys():
            rooms = {path.relative_to(root).parts[1] for path in goals}
            aside = test.relative_to(root).parts[1] not in rooms
            distances[test] = (min(steps[path] for path in found), aside)
    files = sorted(distances, key=lambda test: (distances[test], test))
    return Selection([str(path.relative_to(root)) for path in files])
