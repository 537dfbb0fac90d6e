"""Counts the files of megatron/ that know of one kind of training without being part of it.

`python -m tests.method_files` prints them. A file knows of a kind if an identifier of its code, or a string
that is a key, names the kind or one of its keys, or if it imports a module of the kind. Comments and
docstrings do not count. tests/method_files.toml has each kind's patterns and the most files it may have.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
REGISTRY = "megatron/neox_arguments/methods.py"


@dataclass(frozen=True)
class Method:
    """A kind of training, as the table describes it.

    names: regular expression of identifiers and keys that name it. modules: of modules that are part of it.
    folder: its files; they may name it. max_files: how many others may.
    """

    names: str
    modules: str
    folder: str
    max_files: int


def methods() -> dict[str, Method]:
    """The entries of the table, by the method's name."""
    return {name: Method(**entry) for name, entry in tomllib.loads(TABLE.read_text()).items()}


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Every identifier of the code, the names and paths of its imports, and strings that could be keys."""
    for node in ast.walk(tree):
        for value in (getattr(node, name, None) for name in ("id", "attr", "arg", "name", "module")):
            if isinstance(value, str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield node.value


@cache
def identifiers_of(path: Path) -> frozenset[str]:
    return frozenset(identifiers(ast.parse(path.read_text())))


def files_that_know(method: Method, root: Path = ROOT) -> list[str]:
    """The files outside of the method's folder and the registry that name it or import a part of it."""
    names, modules = re.compile(method.names), re.compile(method.modules)
    anywhere = re.compile(re.sub(r"(?<!\[)\^|\$", "", f"{method.names}|{method.modules}"))
    knowing = []
    for path in sorted((root / "megatron").rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if relative == REGISTRY or relative.startswith(f"{method.folder}/"):
            continue
        if not anywhere.search(path.read_text()):  # parsing takes longer
            continue
        if any(names.search(name) or modules.search(name) for name in identifiers_of(path)):
            knowing.append(relative)
    return knowing


if __name__ == "__main__":
    for name, method in methods().items():
        files = files_that_know(method)
        print(f"{name}: {len(files)} files, at most {method.max_files}", *files, sep="\n  ")
