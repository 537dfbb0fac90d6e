"""Runs in the two processes that judge a model's program: `answer` runs the program, `judge` runs its tests.

The program's process gets the program and, call by call, the arguments of the tests. It never gets the text
of the tests or expected values. `programs.py` runs the source of this file and of `remote_*.py` in the
sandbox.
"""

import ast
import builtins
import contextlib
import io
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from megatron.methods.reinforcement.rewards.remote_objects import Peer

SOCKET, REPORTS = 3, 4  # file descriptors; only the judge has REPORTS
PASSED = b"passed"
_STAND_INS = ("unittest", "mock")
_INSTANCE_OPERATIONS = frozenset("setattr bool str repr format len iter getitem eq ne lt le gt ge".split())


def answer(program: str) -> None:
    """Runs the model's program, then lets the judge use the program's objects until the judge ends."""
    main, process_id = types.ModuleType("__main__"), os.getpid()
    sys.modules["__main__"] = main
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True)
    sys.stdout = printed

    def take_printed() -> str:
        text = printed.buffer.getvalue()[:1_000_000].decode(errors="replace")  # type: ignore[attr-defined]
        printed.seek(0)
        printed.truncate()
        return text

    exec(compile(program, "program", "exec"), main.__dict__)
    if os.getpid() != process_id:  # a child process that the program has forked
        os._exit(0)
    peer = Peer(SOCKET, lambda *_: True, lambda module, name: getattr(__import__(module, fromlist=[name]), name))
    peer.printed = take_printed
    peer.extra = {"names": lambda: list(main.__dict__), "name": main.__dict__.__getitem__}
    peer.serve()


def judge(program: str, tests: str) -> None:
    """Runs the tests on the objects of the program, which runs in the other process. Reports `passed` if no
    test fails."""
    peer = Peer(SOCKET, _may, _exception_or_builtin)
    names = set(peer.ask("names", None))  # waits until the program's code has run
    space = _Names(peer, names, program, ast.parse(tests))
    exec(compile(tests, "tests", "exec"), space)
    peer.ask("names", None)  # fails if the program's process has ended, even if tests caught that exception
    os.write(REPORTS, PASSED)


class _Names(dict[str, Any]):
    """The global variables of tests: their own, then those of the program.

    Built-in names and modules keep their meaning even if the program defines the same names, so that no
    program is judged by its own `abs` or `math`. Exception: if tests use no other name of the program, its
    definition is taken, because it is what they test.
    """

    def __init__(self, peer: Peer, names: set[str], program: str, tests: ast.Module) -> None:
        super().__init__({"__name__": "__main__"})
        nodes = list(ast.walk(tests))
        used_names = {node.id for node in nodes if isinstance(node, ast.Name)}
        attribute_owners = {
            node.value.id for node in nodes if isinstance(node, ast.Attribute) and type(node.value) is ast.Name
        }
        defined, imports = _top_level(program)
        imported = _imported(imports, used_names)
        for name in (attribute_owners & sys.stdlib_module_names) - imported.keys() - {"__main__"}:
            if name in names:
                imported[name] = __import__(name)
        test_names = set(vars(builtins)) | imported.keys()
        if not used_names & names - test_names:
            test_names -= defined
        self.update({name: value for name, value in imported.items() if name in test_names})
        self._peer, self._test_names = peer, test_names

    def __missing__(self, name: str) -> Any:
        if name in self._test_names:
            raise KeyError(name)
        return self._peer.ask("name", None, name)


def _top_level(program: str) -> tuple[set[str], list[ast.Import | ast.ImportFrom]]:
    """Returns (the names that a program's code defines at top level, its import statements at top level)."""
    defined, imports, waiting = set[str](), [], list[ast.AST](ast.parse(program).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return defined, imports


def _imported(imports: list[ast.Import | ast.ImportFrom], used_names: set[str]) -> dict[str, Any]:
    """Repeats a program's imports in this process. Returns the imported objects that tests use, by name.

    Private names and mocks are left out.
    """
    namespace: dict[str, Any] = {}
    for node in imports:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            package = (getattr(node, "module", None) or alias.name).partition(".")[0]
            if (name in used_names or name == "*") and not alias.name.startswith("_") and package not in _STAND_INS:
                statement = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
                with contextlib.suppress(Exception):
                    exec(compile(ast.fix_missing_locations(ast.Module([statement], [])), "imports", "exec"), namespace)
    kinds = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, int, float, str)
    return {name: value for name, value in namespace.items() if name in used_names and isinstance(value, kinds)}


def _may(operation: str, target: Any, arguments: list[Any]) -> bool:
    """Returns whether a program may apply an operation to an object that its tests passed to it.

    A program may call functions, read iterators, and use objects of the tests' classes by public names.
    """
    if operation == "call":
        return callable(target)
    if operation in ("iter", "next"):
        return isinstance(target, Iterator) or (operation == "iter" and type(target).__module__ == "__main__")
    if type(target).__module__ != "__main__":
        return operation == "bool"
    public = operation == "getattr" and isinstance(arguments[0], str) and not arguments[0].startswith("_")
    return public or (
        operation in _INSTANCE_OPERATIONS and not (operation == "setattr" and arguments[0].startswith("_"))
    )


def _exception_or_builtin(module: str, name: str) -> Any:
    """Returns the built-in class, or the exception class of a loaded module, that the program named.

    Raises ValueError for anything else. Imports nothing.
    """
    value = getattr(sys.modules.get(module), name, None)
    if isinstance(value, type) and (module == "builtins" or issubclass(value, BaseException)):
        return value
    raise ValueError(
        f"the program passed {module}.{name} to its tests, which accept only built-in classes and exception classes of "
        "loaded modules"
    )
