"""Finds names that say nothing: function words, empty words, and private words for the field's terms.

A name counts once in each scope (module, class, function) that binds it. A variable set twice counts once.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.lint.finding import Finding

WORDS = Path(__file__).with_name("words.toml")
_CAPITALS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAME_FIELDS: dict[type[ast.AST], str] = {
    ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg", ast.Name: "id",
    ast.Attribute: "attr", ast.alias: "asname", ast.ExceptHandler: "name", ast.MatchAs: "name", ast.MatchStar: "name",
}  # fmt: skip
_LEAVES = frozenset([int, str, float, complex, bytes, bool, type(None), type(...), ast.Load, ast.Store, ast.Del])
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class WordLists:
    """The word lists of tools/lint/words.toml, by which names are judged; comments in that file describe
    them."""

    bare: frozenset[str]
    leading: frozenset[str]
    trailing: frozenset[str]
    private: dict[str, str]
    allowed: frozenset[str]

    @classmethod
    def read(cls, path: Path = WORDS) -> "WordLists":
        lists = tomllib.loads(path.read_text(encoding="utf-8"))
        private, allowed = lists.pop("private"), frozenset(lists.pop("allowed"))
        return cls(private=private, allowed=allowed, **{name: frozenset(words) for name, words in lists.items()})

    def broken_rule(self, name: str) -> str | None:
        """Returns which rule a name breaks, such as `begins with of`; None if it breaks none."""
        words = [word.lower() for word in _CAPITALS.sub("_", name).split("_") if word]
        if not words or name in self.allowed or (name.startswith("__") and name.endswith("__")):
            return None
        for word in words:
            if word in self.private:
                return f"the field says {self.private[word]}"
        if len(words) == 1:
            return "says too little alone" if words[0] in self.bare else None
        if words[0] in self.leading:
            return f"begins with {words[0]}"
        return f"ends with {words[-1]}" if words[-1] in self.trailing else None


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields (name, first line) of each name, once for each scope under `tree` (module, class, function) that
    binds it."""
    names: dict[str, int] = {}
    inner_scopes = []
    nodes = _children(tree)
    while nodes:
        node = nodes.pop()
        field = _NAME_FIELDS.get(type(node))
        name = field and getattr(node, field)
        if name and type(getattr(node, "ctx", None)) in (type(None), ast.Store):
            line = node.lineno  # type: ignore[attr-defined]
            names[name] = min(line, names.get(name, line))
        if type(node) in _LEAVES:  # a str in a list, such as the names of a `global`
            continue
        if isinstance(node, _SCOPES):
            inner_scopes.append(node)
        else:
            nodes += _children(node)
    yield from names.items()
    for scope in inner_scopes:
        yield from bound_names(scope)


def _children(node: ast.AST) -> list[ast.AST]:
    """Returns the direct children of a node, three times as fast as `ast.iter_child_nodes`."""
    nodes: list[ast.AST] = []
    for value in node.__dict__.values():
        kind = type(value)
        if kind is list:
            nodes += value
        elif kind not in _LEAVES:
            nodes.append(value)
    return nodes


def names_of_file(path: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields (name, line) for each name that a parsed file binds, then for the name of its module."""
    yield from bound_names(tree)
    parts = path.removesuffix(".py").split("/")
    yield parts[-2] if parts[-1] == "__init__" and len(parts) > 1 else parts[-1], 1


def check_names(path: str, tree: ast.AST, words: WordLists) -> tuple[int, list[Finding]]:
    """Returns (number of names in a parsed file, findings sorted by line). path: the file, for findings."""
    names = sorted(names_of_file(path, tree), key=lambda name: name[1])
    broken = [(name, line, rule) for name, line in names if (rule := words.broken_rule(name))]
    return len(names), [Finding(path, line, name, rule) for name, line, rule in broken]
