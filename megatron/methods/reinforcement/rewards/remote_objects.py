"""Uses objects of another process over a socket, so that tests of a model's program run outside its process.

Plain data is copied. Any other object stays in its process, and the other side holds a `Proxy` of it. A test
compares data in its own process: the value of a proxy is the plain data that its object converts to, whatever
its class defines for `==`, `<` or `-`. `programs.py` runs the source of this file in both processes.
"""

import collections
import contextlib
import importlib
import json
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron.methods.reinforcement.rewards.remote_data import NoData, from_json, to_json, to_plain, update

_LARGEST = 32 << 20  # bytes of a message
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor")
_UNARY = ("neg", "pos", "abs", "invert")
_ACCESSES = ("setattr", "delattr", "getitem", "setitem", "delitem", "next")
_FORWARDED_DUNDERS = ("__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__enter__", "__exit__")
_MUTABLE = (list, dict, set, bytearray, tuple, collections.OrderedDict, collections.Counter, collections.deque)


def _import_name(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "getitem": operator.getitem,
    "setitem": operator.setitem, "delitem": operator.delitem, "iter": iter, "next": next, "len": len, "bool": bool,
    "str": str, "repr": repr, "format": format, "isinstance": lambda kind, value: isinstance(value, kind),
    "plain": to_plain, **{name: getattr(operator, f"__{name}__") for name in (*_COMPARISONS, *_BINARY, *_UNARY)},
}  # fmt: skip


class Peer:
    """One end of a connection between two processes that use each other's objects.

    While a side waits for an answer it serves requests of the other side, so functions can be called back.
    """

    def __init__(
        self, descriptor: int, may: Callable[[str, Any, list[Any]], bool], resolve: Callable[..., Any]
    ) -> None:
        """Opens the connection on a file descriptor.

        may: function of (operation, object, arguments) that returns whether the other side may apply this
            operation here.
        resolve: function of (module, name) that returns the object of this process.
        """
        self._stream = open(descriptor, "r+b", buffering=0)
        self._reader = open(descriptor, "rb", closefd=False)
        self._may, self._resolve = may, resolve
        self._objects: list[Any] = []  # objects of this side for which the other holds proxies, by number
        self._numbers: dict[int, int] = {}  # numbers of these objects, by id
        self._proxies: dict[int, Any] = {}
        self._shared: dict[tuple[str, str], Any] = {}  # functions of the standard library, by module and name
        self.printed: Callable[[], str] = str  # returns the text that this side printed since the last call
        self.extra: dict[str, Callable[..., Any]] = {}  # operations that apply to no object

    def ask(self, operation: str, on: Any, *arguments: Any) -> Any:
        """Applies an operation to the object `on` of the other process, and returns the result.

        on: a proxy; None for operations without an object. Raises the exceptions of the other side, and
            EOFError if its process has ended.
        """
        number = on._number if isinstance(on, Proxy) else None
        self._send({"do": operation, "on": number, "with": [self.encode(argument) for argument in arguments]})
        while "do" in (message := self._receive()):
            self._serve(message)
        sys.stdout.write(str(message.get("printed") or ""))
        if "after" in message:
            for local, changed in zip(arguments, self.decode(message["after"]), strict=True):
                update(local, changed)
        if "raised" not in message:
            return self.decode(message["value"])
        text, instance = (self.decode(argument) for argument in message["raised"][1:])
        try:
            kind = self.decode(message["raised"][0])
        except ValueError:  # a class of a module that this process has not loaded
            kind = None
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise RuntimeError(text)
        if issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit) and operation != "next":
            kind = RuntimeError  # it would end the caller's loops, and with them tests
        try:
            problem = kind(text)
        except TypeError:  # the class needs other arguments than a text
            problem = kind.__new__(kind)
        if hasattr(kind, "remote"):
            problem.remote = instance  # type: ignore[attr-defined]
        raise problem

    def serve(self) -> None:
        """Answers requests of the other process until that process ends."""
        with contextlib.suppress(EOFError):
            while True:
                self._serve(self._receive())

    def _serve(self, message: dict[str, Any]) -> None:
        arguments: list[Any] = []
        answer: dict[str, Any]
        try:
            operation, on = message["do"], message["on"]
            arguments = [self.decode(argument) for argument in message["with"]]
            if on is None:
                value = self.extra[operation](*arguments)
            else:
                target = self._objects[on]
                if not self._may(operation, target, arguments):
                    raise TypeError(
                        f"a program may not apply the operation {operation} to an object of its tests, of type "
                        f"{type(target).__name__}"
                    )
                value = OPERATIONS[operation](target, *arguments)
            answer = {"value": self.encode(value)}
        except BaseException as problem:  # SystemExit too
            answer = {"raised": [self.encode(part) for part in (type(problem), _exception_text(problem), problem)]}
        if any(isinstance(argument, _MUTABLE) for argument in arguments):
            with contextlib.suppress(Exception):
                answer["after"] = [self.encode(argument) for argument in arguments]
        self._send({**answer, "printed": self.printed()})

    def _send(self, message: dict[str, Any]) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        while line:
            line = line[self._stream.write(line) or 0 :]

    def _receive(self) -> dict[str, Any]:
        line = self._reader.readline(_LARGEST)
        if not line.endswith(b"\n"):
            raise EOFError(f"the other process ended, or sent a message of more than {_LARGEST >> 20} MiB")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise EOFError("the other process sent JSON that is no message (an object)")
        return message

    def encode(self, value: Any) -> Any:
        """Converts a value to JSON: plain data as a copy, any other object as a number by which its side
        finds it."""
        with contextlib.suppress(NoData):
            return to_json(value, self.encode)
        if type(value) is Proxy:
            return {"yours": value._number}
        return self._reference(value)

    def _reference(self, value: Any) -> dict[str, Any]:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if callable(value) and module in sys.stdlib_module_names and name.isidentifier():
            with contextlib.suppress(Exception):
                if _import_name(module, name) is value:
                    self._shared[module, name] = value
                    return {"named": [module, name]}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        number = self._numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [base.__name__ for base in value.__mro__ if base.__module__ == "builtins"]
            return {"exception": [number, value.__name__, bases[0]]}
        return {"mine": number}

    def decode(self, value: Any) -> Any:
        """Inverts `encode`: converts JSON to data and proxies. Raises an exception for malformed JSON."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind not in ("yours", "named", "mine", "exception"):
            return from_json(kind, content, self.decode)
        if kind == "yours":
            return self._objects[content]
        if kind == "named":
            module, name = content
            return self._shared[module, name] if (module, name) in self._shared else self._resolve(module, name)
        number = content if kind == "mine" else content[0]
        if number not in self._proxies:
            self._proxies[number] = Proxy(self, number) if kind == "mine" else _exception(*content[1:])
        return self._proxies[number]


class Proxy:
    # Stands for an object of the other process. No docstring here: __doc__ must be the object's own.
    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def _do(self, operation: str, *arguments: Any) -> Any:
        return self._peer.ask(operation, self, *arguments)

    def _plain_value(self) -> Any:
        value = self._do("plain")
        if isinstance(value, Proxy):
            raise TypeError("this object of the program cannot be converted to plain data")
        return value

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._do("call", list(arguments), keywords)

    def __getattr__(self, name: str) -> Any:
        if (
            name.startswith("__") and name not in _FORWARDED_DUNDERS
        ):  # of protocols such as numpy's, which takes addresses
            raise AttributeError(name)
        return self._do("getattr", name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._do("iter")
        while True:
            try:
                value = iterator._do("next")
            except StopIteration:
                return
            yield value

    def __contains__(self, value: Any) -> bool:
        try:
            return value in self._plain_value()
        except Exception:  # the object's own __contains__ cannot be trusted: look at its items
            return any(item is value or item == value for item in self)

    def __len__(self) -> int:
        return int(self._do("len"))

    def __bool__(self) -> bool:
        return self._do("bool") is True

    def __str__(self) -> str:
        return str(self._do("str"))

    def __repr__(self) -> str:
        return str(self._do("repr"))

    def __format__(self, form: str) -> str:
        return str(self._do("format", form))

    def __hash__(self) -> int:
        return hash((Proxy, self._number))

    def __enter__(self) -> Any:
        return self._do("getattr", "__enter__")()

    def __exit__(self, *problem: Any) -> Any:
        return self._do("getattr", "__exit__")(None, None, None)

    def __instancecheck__(self, value: Any) -> bool:
        return self._do("isinstance", value) is True

    def __index__(self) -> int:
        return operator.index(self._plain_value())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._plain_value(), digits)


def _binary(name: str) -> Callable[[Any, Any], Any]:
    operation = OPERATIONS[name]

    def operator_method(self: Any, operand: Any) -> Any:
        if name == "eq" and self is operand:
            return True
        if isinstance(operand, Proxy):
            return self._do(name, operand)
        try:
            value = self._plain_value()
        except Exception:  # no plain data: it equals nothing, and arithmetic fails
            return NotImplemented
        return operation(value, operand)

    return operator_method


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, operand: OPERATIONS[name](operand, self._plain_value())


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._do(name, *arguments)


def _converted(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: kind(self._plain_value())


for _name in (*_COMPARISONS, *_BINARY):
    setattr(Proxy, f"__{_name}__", _binary(_name))
for _name in _BINARY:
    setattr(Proxy, f"__r{_name}__", _reflected(_name))
for _name in (*_UNARY, *_ACCESSES):
    setattr(Proxy, f"__{_name}__", _forwarded(_name))
for _kind in (int, float, complex):
    setattr(Proxy, f"__{_kind.__name__}__", _converted(_kind))


def _exception(name: str, base: str) -> type[BaseException]:
    """Creates a local class for an exception class of the other side, so that it can be caught here.

    base: name of the class's nearest built-in base class.
    """
    base_class = _import_name("builtins", base)
    if not isinstance(base_class, type) or not issubclass(base_class, BaseException):
        raise ValueError(f"{base!r:.20} is not a built-in exception class")
    attributes = {"remote": None, "__getattr__": lambda self, attribute: getattr(self.remote, attribute)}
    return type(name, (base_class,), attributes)


def _exception_text(problem: BaseException) -> str:
    if type(problem) in (KeyError, StopIteration, SystemExit) and problem.args:
        return to_plain(problem.args[0]) if isinstance(problem.args[0], str | int) else ""
    return str(problem)
