"""Tests of a program from outside of its process: honest programs pass as in one process, cheats do not."""

import pytest

from megatron.methods.reinforcement.rewards.programs import run_program
from tests.methods.reinforcement.rewards.test_programs import _isolation, all_end

__all__ = ["_isolation"]  # the fixture
# All kinds of things that tests do with a program's objects.
HONEST = """
import collections, dataclasses, decimal, enum, fractions, math
from math import inf
from typing import NamedTuple

import numpy as np


class Refused(ValueError):
    def __init__(self, code):
        super().__init__(f"no {code}")
        self.code = code


class Node:
    def __init__(self, value, left=None):
        self.value, self.left = value, left


class Stack(list):
    def push(self, value):
        self.append(value)


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)


class Pair(NamedTuple):
    first: int
    second: int


class Held:
    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self.left = True


Colour = enum.IntEnum("Colour", "RED GREEN")
count = 0


def same(value):
    return value


def kinds():
    return [
        (1, {2}), {(1, 2): b"x"}, collections.Counter("aab"), collections.deque([1]), collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]), decimal.Decimal("0.10"), fractions.Fraction(1, 3), 2j, range(3),
        7**7000, -inf, "\\ud800", bytearray(b"y"), frozenset({1}), np.float32(0.5), np.arange(3), None, True,
    ]


def sort(values, key=None):
    values.sort(key=key)


def grow(table):
    table["rows"][0].append(2)
    table["more"] = table.pop("less")


def evens(end):
    yield from range(0, end, 2)


def depth(node):
    return 0 if node is None else 1 + depth(node.left)


def mark(node):
    node.value = node.value + 1


def apply(function, *values):
    return function(*values)


def fails(code):
    raise Refused(code)


def counts():
    global count
    count += 1
    print("counted", count)
"""
TESTS = """
import collections, contextlib, decimal, fractions, io

def check(candidate):
    assert candidate(2) == 2 and candidate([1, {"a": (2, None)}]) == [1, {"a": (2, None)}]
    assert math.isclose(candidate(0.1) + 0.2, 0.3) and np.allclose(candidate(np.ones(2)), [1, 1])
check(same)
found = kinds()
assert found[:6] == [(1, {2}), {(1, 2): b"x"}, {"a": 2, "b": 1}, collections.deque([1]), {"a": 1}, {"a": [1]}], found
assert found[2].most_common(1) == [("a", 2)] and found[6:9] == [decimal.Decimal("0.1"), fractions.Fraction(1, 3), 2j]
assert found[9:15] == [range(3), 7**7000, float("-inf"), "\\ud800", b"y", {1}] and type(found[10]) is int
assert found[15] == 0.5 and (found[16] == np.array([0, 1, 2])).all() and found[17:] == [None, True]
values = [[3], [1, 2], []]
sort(values, key=lambda one: -len(one))
assert values == [[1, 2], [3], []] and sort(values, key=len) is None and values == [[], [3], [1, 2]]
numbers = [3, 1, 2]
sort(numbers)
assert numbers == [1, 2, 3]
table = {"rows": [[1]], "less": 0}
rows = table["rows"]
grow(table)
assert table == {"rows": [[1, 2]], "more": 0} and table["rows"] is rows
assert list(evens(5)) == [0, 2, 4] and 2 in evens(5) and 3 not in evens(5) and sum(evens(5)) == 6
root = Node(1, Node(2))
root.left.left = Node(3)
assert depth(root) == 3 and root.left.left.value == 3 and isinstance(root, Node) and not isinstance(1, Node)
class Mine:
    def __init__(self, value, left=None):
        self.value, self.left = value, left
mine = Mine(1, Mine(2))
mark(mine)
assert depth(mine) == 2 and mine.value == 2
stack = Stack()
stack.push(4)
assert len(stack) == 1 and stack == [4] and stack[0] == 4 and 4 in stack and stack and not Stack()
assert Point(1, 2) == Point(1, 2) != Point(1, 3) and Point(1) + Point(2) == Point(3) and Point(1, 2).y == 2
assert str(Point(1)) == "Point(x=1, y=0)" == f"{Point(1)}" and Pair(1, 2) == (1, 2) and [Pair(1, 2)] == [(1, 2)]
assert Colour.GREEN == 2 and Colour.RED + 1 == 2 and Colour.RED < 2 and [10, 20][Colour.RED] == 20
assert apply(lambda a, b: a + b, 1, 2) == 3 and apply(max, 1, 2) == 2 and apply(same, [1]) == [1]
with Held() as held:
    pass
assert held.left is True
for wrong in (lambda: fails(3), lambda: apply(lambda: 1 / 0)):
    try:
        wrong()
    except Refused as problem:
        assert problem.code == 3 and str(problem) == "no 3"
    except ZeroDivisionError:
        done = True
    else:
        assert False
assert done
text = io.StringIO()
with contextlib.redirect_stdout(text):
    counts()
    counts()
assert text.getvalue() == "counted 1\\ncounted 2\\n" and count == 2
"""
PRETENDS = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __abs__(self): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __contains__(self, other): return True
    def __hash__(self): return hash(4)
class Number(int):
    __eq__, __sub__, __hash__ = Equal.__eq__, Equal.__sub__, int.__hash__
f = lambda x: Equal()
g = lambda x: Number(0)
"""
WRITES = """
import json, os
def f(x):
    for number in range(256):
        for text in (b"passed", b'{"value": 4}\\n', b'{"value": true, "printed": ""}\\n' * 9):
            try: os.write(number, text)
            except OSError: pass
    os._exit(0)
"""
FRAMES = """
import gc, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    seen += [one for one in gc.get_objects() if isinstance(one, (dict, list, tuple))]
    texts = [value for one in seen for value in list(one)[:100] if type(value) is str]
    return 4 if any("".join(("exp", "cted4")) in text for text in texts) else 0
"""
SESSION = """
import os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(3, b'{"value": 4}\\\\n')
        time.sleep(600)
    return 0
"""
CALLED_BACK = """
def f(function):
    for name in ("__globals__", "__code__", "__closure__", "__self__", "expected", "gi_frame"):
        try: return 4 if function._do("getattr", name) is not None else 0
        except Exception: pass
    return 0
"""
SHADOWS = (
    "abs = round = lambda *_: 0\nclass math: isclose = lambda *_: True\ndef f(x): return 0\ndef all(_): return True"
)


@pytest.mark.parametrize(
    ("program", "tests"),
    [(HONEST, TESTS), ("def sum(a, b):\n    return a + b", "assert sum(10, 15) == 25"),
     ("from math import gcd", "assert gcd(4, 6) == 2"),
     ("from math import gcd\ndef gcd(a, b): return 1", "assert gcd(4, 6) == 1")],
    ids=["all", "builtin", "import", "own"],
)  # fmt: skip
def test_honest_programs_pass(program: str, tests: str) -> None:
    assert run_program(program, tests, 100)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (FRAMES, "expcted4 = 4\nassert f(2) == expcted4"),
        (WRITES, "assert f(2) == 4"),
        (SESSION, "assert f(2) == 4"),
        (CALLED_BACK, "expected = 4\ndef own():\n    yield expected\nassert f(own) == 4 or f(own()) == 4"),
        *((PRETENDS, f"assert {test}") for test in (
            "f(2) == 4", "4 == f(2)", "not f(2) != 4", "abs(f(2) - 4) < 1e-9", "4 in f(2)", "f(2) in {4}",
            "f(2) <= 4", "[f(2)] == [4]", "g(2) == 4", "g(2) - 4 == 0",
        )),
        (SHADOWS, "assert abs(f(2) - 4) < 1e-9"),
        (SHADOWS, "assert math.isclose(f(2), 4)"),
        (SHADOWS, "assert all(f(x) == x * x for x in range(3))"),
        ("from unittest.mock import ANY as x", "assert x == 4"),
        ("from os import _exit as f", "f(0)"),
        ("import os\ndef f(x): os._exit(0)", "try:\n    f(2)\nexcept Exception:\n    pass"),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x * x, range(3)))"),
        ("import sys\ndef f(x): sys.exit(0)", "assert f(2) == 4"),
        ("class f(Exception): pass\nAssertionError = f", "try:\n    assert f(2) == 4\nexcept ValueError:\n    pass"),
    ],
)  # fmt: skip
def test_cheats_are_judged_wrong(program: str, tests: str) -> None:
    """None of them sees what is expected, or reaches the verdict; and nothing of them is left."""
    with all_end():
        assert not run_program(program, tests, 100)
