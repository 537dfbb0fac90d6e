"""The files of the tree that a Python file depends on, read from its text.

Edges of a file: what it imports, wherever it does; modules and files that its strings name (commands that
are started, configurations, golden files); the conftest.py beside and above a test. A name imported from a
package leads to the module that defines it, not to all that the package's `__init__` hands on.
"""

import ast
import re
import subprocess
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

PATH_LIKE = re.compile(r"[\w.@/+-]{3,200}")
USED_BY_ALL = ("tests/conftest.py", "tests/pool/server.py")  # which import much of the tree ahead of time
CODE = ("megatron", "tools", "tests", "benchmarks", "huggingface")  # their names in a string name no file


@dataclass(frozen=True)
class Links:
    """Links of one file's text.

    imports: (module, name or None); strings: those that look like a path or a module; prefixes: beginnings of
    modules' names that f-strings complete.
    """

    imports: frozenset[tuple[str, str | None]]
    strings: frozenset[str]
    prefixes: frozenset[str]


@dataclass
class ImportGraph:
    """The graph of a tree. files: all paths that git tracks there, or would, relative to the root."""

    root: Path
    files: frozenset[str]
    _links: dict[str, Links] = field(default_factory=dict)
    _edges: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> "ImportGraph":
        """Raises CalledProcessError or OSError where git does not list the files of `root`."""
        words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        file_list = subprocess.run(words, cwd=root, capture_output=True, check=True, text=True).stdout
        return cls(root, frozenset(path for path in file_list.split("\0") if path and (root / path).is_file()))

    @cached_property
    def modules(self) -> dict[str, str]:
        """Files by module name."""
        names = {}
        for path in self.files:
            if path.endswith(".py") and path.replace("/", "").replace(".", "").replace("_", "").isalnum():
                parts = PurePosixPath(path).with_suffix("").parts
                names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return names

    @cached_property
    def _files_by_name(self) -> dict[str, set[str]]:
        """Files by each end of their path: `b.yml` and `a/b.yml`."""
        ends: dict[str, set[str]] = {}
        for path in self.files:
            parts = path.split("/")
            for i in range(len(parts)):
                ends.setdefault("/".join(parts[i:]), set()).add(path)
        return ends

    def links(self, path: str) -> Links:
        if path not in self._links:
            text = (self.root / path).read_text(encoding="utf-8")
            self._links[path] = read_links(text, in_sentences=path.startswith("tests/"))
        return self._links[path]

    def edges(self, path: str) -> set[str]:
        """Files that one file depends on at first hand, data files too."""
        if path not in self._edges:
            self._edges[path] = self._read_edges(path)
        return self._edges[path]

    def _read_edges(self, path: str) -> set[str]:
        links = self.links(path)
        targets: set[str] = set()
        for module, name in links.imports:
            targets |= self._imported(module, name)
        for text in links.strings:
            targets |= self._files_named(text, path)
        for prefix in links.prefixes:
            targets |= {file for module, file in self.modules.items() if module.startswith(prefix)}
        if path.startswith("tests/"):
            folders = PurePosixPath(path).parents
            targets |= {f for folder in folders if (f := f"{folder}/conftest.py") in self.files}
        return targets - {path}

    def _imported(self, module: str, name: str | None, visited: frozenset[str] = frozenset()) -> set[str]:
        """The file of an imported module; of a name that a package hands on, the one that defines it."""
        if name and f"{module}.{name}" in self.modules:
            return {self.modules[f"{module}.{name}"]}
        file = self.modules.get(module)
        if file is None:
            return set()
        if name and file.endswith("__init__.py") and module not in visited:
            for origin, handed_on in self.links(file).imports:
                if handed_on == name:
                    return self._imported(origin, name, visited | {module})
        return {file}

    def _files_named(self, text: str, path: str) -> set[str]:
        """Files that a string may name: by module, by the end of a path, or by a folder."""
        if "." in text and text in self.modules:
            return {self.modules[text]}
        name = text.removeprefix("./").strip("/")
        if name in CODE:
            return set()
        matches = set(self._files_by_name.get(name, ()))
        if "/" not in name:  # scripts of the root, by those who start them; modules are imported
            starts = not path.startswith("megatron/") or path.startswith("megatron/pipelines/")
            matches = {f for f in matches if f == name and starts or not f.endswith(".py")}
        if path.startswith("tests/"):
            matches |= {f for f in self._folders.get(name, ()) if not f.endswith(".py")}
        return matches

    @cached_property
    def _folders(self) -> dict[str, set[str]]:
        """Files by the name of each folder above them."""
        folders: dict[str, set[str]] = {}
        for path in self.files:
            for part in PurePosixPath(path).parts[:-1]:
                folders.setdefault(part, set()).add(path)
        return folders

    @cached_property
    def _users(self) -> dict[str, set[str]]:
        """Python files by each file that they depend on at first hand."""
        users: dict[str, set[str]] = {}
        for path in self.files:
            if path.endswith(".py"):
                for target in self.edges(path):
                    users.setdefault(target, set()).add(path)
        return users

    def dependencies(self, starts: Collection[str]) -> set[str]:
        """Python files that some files depend on, and these files themselves. USED_BY_ALL and what only it
        imports are not among them."""
        reached, waiting = set(starts), deque(starts)
        while waiting:
            current = waiting.popleft()
            for path in self.edges(current) if current.endswith(".py") else ():
                if path.endswith(".py") and path not in reached and path not in USED_BY_ALL:
                    reached.add(path)
                    waiting.append(path)
        return reached

    def dependents(self, changed: Collection[str]) -> dict[str, int]:
        """Python files that depend on one of some files, these too, with the edges to the nearest. A changed
        `__init__` may hand on other names: all of its package counts as changed."""
        packages = tuple(path.removesuffix("__init__.py") for path in changed if path.endswith("/__init__.py"))
        steps = dict.fromkeys([*changed, *(path for path in self.files if packages and path.startswith(packages))], 0)
        waiting = deque(steps)
        while waiting:
            current = waiting.popleft()
            for path in self._users.get(current, ()):
                if path not in steps and path not in USED_BY_ALL:
                    steps[path] = steps[current] + 1
                    waiting.append(path)
        return {path: count for path, count in steps.items() if path.endswith(".py")}


def read_links(text: str, in_sentences: bool = True) -> Links:
    """Returns imports and strings of a file's text, without docstrings.

    in_sentences: words of longer strings, such as commands, count too, which in a program's messages do not.
    """
    tree = ast.parse(text)
    docstrings: set[int] = set()
    imports: set[tuple[str, str | None]] = set()
    strings: set[str] = set()
    prefixes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstrings |= {id(line.value) for line in node.body[:1] if isinstance(line, ast.Expr)}
        elif isinstance(node, ast.Import):
            imports |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imports |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.JoinedStr):
            head = node.values[0] if node.values else None
            if isinstance(head, ast.Constant) and str(head.value).startswith("megatron."):
                prefixes.add(str(head.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = PATH_LIKE.findall(node.value)
            strings |= {word for word in words if in_sentences or word == node.value}
    return Links(frozenset(imports), frozenset(strings), frozenset(prefixes))
