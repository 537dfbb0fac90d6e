"""The two processes that judge a program of a model: it runs in one (`answer`), its tests in the other
(`judge`).

The program's process is given the program and, call by call, the arguments of a test, never its text or what
it expects. `programs.py` has the source of this file and of `remote_*.py` run in the sandbox."""

import ast
import builtins
import contextlib
import io
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from megatron.rollouts.rewards.remote_objects import Peer

SOCKET, REPORTS = 3, 4  # file descriptors; the second one is the judge's alone
PASSED = b"passed"
_STAND_INS = ("unittest", "mock")
_OF_INSTANCES = frozenset("setattr bool str repr format len iter getitem eq ne lt le gt ge".split())


def answer(program: str) -> None:
    """Run the program, then do with its objects what its judge asks for."""
    main, ours = types.ModuleType("__main__"), os.getpid()
    sys.modules["__main__"] = main
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True)
    sys.stdout = printed

    def take_printed() -> str:
        text = printed.buffer.getvalue()[:1_000_000].decode(errors="replace")  # type: ignore[attr-defined]
        printed.seek(0)
        printed.truncate()
        return text

    exec(compile(program, "program", "exec"), main.__dict__)
    if os.getpid() != ours:  # a child that it has forked
        os._exit(0)
    peer = Peer(SOCKET, lambda *_: True, lambda module, name: getattr(__import__(module, fromlist=[name]), name))
    peer.printed = take_printed
    peer.extra = {"names": lambda: list(main.__dict__), "name": main.__dict__.__getitem__}
    peer.serve()


def judge(program: str, tests: str) -> None:
    """Run the tests against the program in the other process, and report if they come to their end."""
    peer = Peer(SOCKET, _may, _exception_or_builtin)
    names = set(peer.ask("names", None))  # answered when the program has run through
    space = _Names(peer, names, program, ast.parse(tests))
    exec(compile(tests, "tests", "exec"), space)
    peer.ask("names", None)  # a program that has ended has not passed, though tests may have caught that
    os.write(REPORTS, PASSED)


class _Names(dict[str, Any]):
    """The names that tests see: their own, then the program's.

    What tests can have without the program keeps its meaning whatever that calls so: built-in names and
    modules, so that no program judges itself by an `abs` or `math` of its own. Only where tests use nothing
    else of the program, it is the one that they are about."""

    def __init__(self, peer: Peer, names: set[str], program: str, tests: ast.Module) -> None:
        super().__init__({"__name__": "__main__"})
        nodes = list(ast.walk(tests))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        of_modules = {
            node.value.id for node in nodes if isinstance(node, ast.Attribute) and type(node.value) is ast.Name
        }
        defined, imports = _top_level(program)
        imported = _imported(imports, used)
        for name in (of_modules & sys.stdlib_module_names) - imported.keys() - {"__main__"}:
            if name in names:
                imported[name] = __import__(name)
        ours = set(vars(builtins)) | imported.keys()
        if not used & names - ours:
            ours -= defined
        self.update({name: value for name, value in imported.items() if name in ours})
        self._peer, self._ours = peer, ours

    def __missing__(self, name: str) -> Any:
        if name in self._ours:
            raise KeyError(name)
        return self._peer.ask("name", None, name)


def _top_level(program: str) -> tuple[set[str], list[ast.Import | ast.ImportFrom]]:
    """What a program defines by its text, and what it imports, outside of functions and classes."""
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


def _imported(imports: list[ast.Import | ast.ImportFrom], used: set[str]) -> dict[str, Any]:
    """What of a program's imports is used, imported here: modules, classes and functions with public names,
    and none that stand for anything else."""
    found: dict[str, Any] = {}
    for node in imports:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            package = (getattr(node, "module", None) or alias.name).partition(".")[0]
            if (name in used or name == "*") and not alias.name.startswith("_") and package not in _STAND_INS:
                one = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
                with contextlib.suppress(Exception):
                    exec(compile(ast.fix_missing_locations(ast.Module([one], [])), "imports", "exec"), found)
    kinds = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, int, float, str)
    return {name: value for name, value in found.items() if name in used and isinstance(value, kinds)}


def _may(operation: str, target: Any, arguments: list[Any]) -> bool:
    """Whether a program may have this done with an object of its tests that these have handed it: functions
    are called, iterators read, and objects of classes of the tests used by public names."""
    if operation == "call":
        return callable(target)
    if operation in ("iter", "next"):
        return isinstance(target, Iterator) or (operation == "iter" and type(target).__module__ == "__main__")
    if type(target).__module__ != "__main__":
        return operation == "bool"
    public = operation == "getattr" and isinstance(arguments[0], str) and not arguments[0].startswith("_")
    return public or (operation in _OF_INSTANCES and not (operation == "setattr" and arguments[0].startswith("_")))


def _exception_or_builtin(module: str, name: str) -> Any:
    """A class that a program may name as its own value or exception: nothing is imported for it."""
    value = getattr(sys.modules.get(module), name, None)
    if isinstance(value, type) and (module == "builtins" or issubclass(value, BaseException)):
        return value
    raise ValueError(f"a program names {module}.{name}")
