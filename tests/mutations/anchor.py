"""Finds the place of a mistake by function and expression, wherever the function stands now.

Source is compared as syntax trees, so that whitespace, comments and line breaks do not matter.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutations.mistakes import Mistake

FOLDERS = ("megatron", "tools")
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class NoLongerApplies(Exception):
    """The code has no such place, or several."""


@dataclass(frozen=True, order=True)
class Place:
    """A range of source text in a file: lines from 1, columns in bytes of UTF-8."""

    path: Path
    line: int
    column: int
    end_line: int
    end_column: int


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _functions(text: str) -> dict[str, list[ast.AST]]:
    """Functions and classes of a file by qualified name, of which a file may have several."""
    scopes: dict[str, list[ast.AST]] = {}
    for name, scope in _scopes(_parsed(text)):
        scopes.setdefault(name, []).append(scope)
    return scopes


def _dump(node: ast.AST) -> str:
    """Equal for equal code, whether it is read or assigned to."""
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


def _scopes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, SCOPES):
            yield prefix + node.name, node
            yield from _scopes(node, f"{prefix}{node.name}.")
        else:
            yield from _scopes(node, prefix)


def _statement_lists(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _matches(tree: ast.AST, mistake: Mistake) -> Iterator[tuple[ast.AST, ast.AST]]:
    """First and last node of each place of `before`."""
    expression = _expression(mistake.before)
    if expression is not None and _expression(mistake.after) is not None:
        form = _dump(expression)
        yield from ((node, node) for node in ast.walk(tree) if type(node) is type(expression) and _dump(node) == form)
        return
    try:
        forms = [_dump(statement) for statement in ast.parse(textwrap.dedent(mistake.before)).body]
    except SyntaxError as error:
        raise NoLongerApplies(f"{mistake.name}: {mistake.before!r} is no Python") from error
    for statements in _statement_lists(tree):
        for start in range(len(statements) - len(forms) + 1):
            candidates = statements[start : start + len(forms)]
            if all(_dump(node) == form for node, form in zip(candidates, forms, strict=True)):
                yield candidates[0], candidates[-1]


def _places(path: Path, tree: ast.AST, mistake: Mistake) -> list[Place]:
    spans = {
        Place(path, start.lineno, start.col_offset, last.end_lineno, last.end_col_offset)  # type: ignore[attr-defined]
        for start, last in _matches(tree, mistake)
    }
    return sorted(spans)


class Tree:
    """The source of a tree as it is now, in which places are looked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
        self.texts = {path: path.read_text(encoding="utf-8") for path in files}

    def find(self, mistake: Mistake) -> Place:
        """Returns the place to make the mistake at.

        In the one function of its name that holds `before`; where none does, in the one place of the whole
        tree that does. Raises NoLongerApplies.
        """
        words = set(re.findall(r"[^\W\d]\w+", mistake.before))
        files = {path: text for path, text in self.texts.items() if all(word in text for word in words)}
        functions = self._places_by_function(files, mistake) if mistake.function else []
        if len(functions) > 1:
            names = ", ".join(str(places[0].path.relative_to(self.root)) for places in functions)
            raise NoLongerApplies(f"{mistake.name}: {mistake.function} of {names} all hold {mistake.before!r}")
        if functions:
            places = functions[0]
            if mistake.occurrence:
                places = places[mistake.occurrence - 1 : mistake.occurrence]
        else:
            places = [place for path, text in files.items() for place in _places(path, _parsed(text), mistake)]
        if len(places) != 1:
            searched = mistake.function if functions else "the whole tree"
            raise NoLongerApplies(f"{mistake.name}: {len(places)} places in {searched} are {mistake.before!r}")
        return places[0]

    def _places_by_function(self, files: Mapping[Path, str], mistake: Mistake) -> list[list[Place]]:
        """Places in each function of the mistake's name that holds any."""
        own_name, matches = mistake.function.rpartition(".")[2], []
        for path, text in files.items():
            if own_name in text:
                for scope in _functions(text).get(mistake.function, ()):
                    if places := _places(path, scope, mistake):
                        matches.append(places)
        return matches

    def changed(self, mistake: Mistake) -> tuple[Path, str]:
        """The file of a mistake, and its text with it. Raises NoLongerApplies."""
        place = self.find(mistake)
        return place.path, changed(self.texts[place.path], place, mistake)


def changed(text: str, place: Place, mistake: Mistake) -> str:
    """The text of the place's file with the mistake made.

    Raises NoLongerApplies where the result is no Python or the same, or the place is inside an f-string,
    whose parts have no exact places.
    """
    lines = text.encode().splitlines(keepends=True)
    head = b"".join(lines[: place.line - 1]) + lines[place.line - 1][: place.column]
    tail = lines[place.end_line - 1][place.end_column :] + b"".join(lines[place.end_line :])
    old = text.encode()[len(head) : len(text.encode()) - len(tail)].decode()
    if (_expression(mistake.before), _expression(mistake.after)).count(None) == 0:
        exact = _form(f"({old})") == _form(mistake.before) != _form(mistake.after)
        new = f"({mistake.after.strip()})"
    else:
        exact = _form(mistake.before) != _form(mistake.after)
        new = textwrap.indent(textwrap.dedent(mistake.after).strip() or "pass", " " * place.column).lstrip()
    result = head.decode() + new + tail.decode()
    try:
        compile(result, str(place.path), "exec")
    except SyntaxError as error:
        raise NoLongerApplies(f"{mistake.name}: {error} once it is made") from error
    if not exact:
        raise NoLongerApplies(f"{mistake.name}: {mistake.before!r} cannot be replaced in {place.path}:{place.line}")
    return result


def _form(source: str) -> str:
    """Equal for equal code; that which is no Python by itself equals nothing."""
    try:
        return _dump(ast.parse(textwrap.dedent(source).strip()))
    except SyntaxError:
        return source
