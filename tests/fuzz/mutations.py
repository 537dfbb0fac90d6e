"""Strategies that spoil a valid input: its bytes, the values in its JSON or YAML, or the files themselves."""

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tests.fuzz.cases import FOLDER, MISSING, PIPE, Entry, Odd

ODD_TEXTS = (
    "", " ", "auto", "null", "0", "-1", "007", "1e5", "1_000", "0x10", "nan", "inf", "True", "no", "x" * 5000, "\0",
    "a\0b", "\ud800", "\u202eé\U0001f600", "../..", "/", "/dev/null", "~", "~nobody/x", ".", "*", "[", "[1", "a,b",
    "a:b", "a=b", "s3://bucket/x", "hf://a/b", "http://[::1", "${HOME}", "${", "{{", "{%", "%s", "a\nb", "\r", "-",
    "--", "9" * 5000, "1/0", "²", "١", "fp16", "adam", "1.5e400",
)  # fmt: skip
ODD_NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0,
    1e-320, 1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
ODD_CONTAINERS: tuple[Any, ...] = (
    [], {}, [None], [[]], [""], {"": None}, {"a": {"b": [1]}}, ["a", 1, None], {"type": 3}, [[1, 2], [3]],
    list(range(300)),
)  # fmt: skip
ODD_BYTES = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r\n", b"\t", b"{", b"}", b"[", b"]", b'"', b"'", b":", b",", b"\\",
    b"#", b"&a ", b"*a", b"!!python/object:os.system ", b"---\n", b"<<: ", b"[" * 3000, b"{a: " * 200, b"9" * 5000,
    b"1e999", b"NaN", b"\x80", b"\xed\xa0\x80", b"\xff" * 8, b"\0" * 64, b"${X}", b"\\ud800", b"-", b".", b"/../",
)  # fmt: skip
values: SearchStrategy[Any] = st.one_of(
    st.sampled_from(ODD_TEXTS), st.sampled_from(ODD_NUMBERS), st.sampled_from(ODD_CONTAINERS),
    st.sampled_from([None, True, False]), st.integers(-9, 300), st.text(max_size=8), st.floats(),
)  # fmt: skip
texts: SearchStrategy[str] = st.one_of(st.sampled_from(ODD_TEXTS), st.integers(-2, 70000).map(str), st.text(max_size=8))
odd_files: SearchStrategy[Odd] = st.sampled_from(
    [MISSING, FOLDER, PIPE, Odd("link", "nowhere"), Odd("link", "."), Odd("link", "/dev/null"), Odd("link", "itself")]
)


@st.composite
def spoilt_bytes(draw: DrawFn, original: bytes) -> bytes:
    """The bytes after one to three changes: cut, flipped, inserted, removed, repeated or encoded anew."""
    data = original
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.sampled_from([1, 2, 8, 64, 1 << 20])))
        match draw(st.sampled_from(["cut", "flip", "insert", "remove", "repeat", "encode", "random"])):
            case "cut":
                data = data[:start]
            case "flip" if start < len(data):
                flipped = data[start] ^ 1 << draw(st.integers(0, 7))
                data = data[:start] + bytes([flipped]) + data[start + 1 :]
            case "insert":
                data = data[:start] + draw(st.sampled_from(ODD_BYTES)) + data[start:]
            case "remove":
                data = data[:start] + data[stop:]
            case "repeat":
                data = data[:stop] + data[start:]
            case "encode":
                encoding = draw(st.sampled_from(["utf-16", "utf-8-sig", "utf-32-le", "latin-1"]))
                data = data.decode("utf-8", errors="replace").encode(encoding, errors="replace")
            case "random":
                data = data[:start] + draw(st.binary(max_size=12)) + data[stop:]
    return data


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value inside a value of JSON, and () for itself."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def _change(draw: DrawFn, value: Any) -> Any:
    path = draw(st.sampled_from(list(places(value))[-4000:]))
    if not path:
        return copy.deepcopy(draw(values)) if draw(st.integers(0, 9)) == 0 else value
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    match draw(st.sampled_from(["set", "set", "set", "drop", "wrap", "deep", "text", "rename", "add", "move"])):
        case "set":
            holder[key] = copy.deepcopy(draw(values))
        case "drop":
            del holder[key]
        case "wrap":
            holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}, [holder[key]] * 3]))
        case "deep":
            holder[key] = f"@nested {draw(st.sampled_from([5, 60, 300, 450, 900]))}@"
        case "text":
            holder[key] = str(holder[key])
        case "rename" if isinstance(holder, dict):
            holder[draw(texts)] = holder.pop(key)
        case "add" if isinstance(holder, dict):
            holder[draw(texts)] = copy.deepcopy(draw(values))
        case "add" | "rename":
            holder.insert(key, copy.deepcopy(draw(values)))
        case "move":
            source = value
            for part in draw(st.sampled_from(list(places(value))[-4000:])):
                source = source[part]
            holder[key] = copy.deepcopy(source)
    return value


@st.composite
def spoilt_value(draw: DrawFn, original: Any) -> Any:
    """A value of JSON after one to three changes: fields dropped, retyped, renamed, nested, extreme."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        value = _change(draw, value)
    return value


def json_bytes(value: Any) -> bytes:
    """The JSON of a value. `@nested N@` stands for lists inside each other, too deep to be made in Python."""
    text = json.dumps(value)
    return re.sub(r'"@nested (\d+)@"', lambda depth: "[" * int(depth[1]) + "]" * int(depth[1]), text).encode()


@st.composite
def spoilt_json(draw: DrawFn, original: Any) -> bytes:
    """The JSON of a spoilt value, in one of five times with spoilt bytes as well."""
    content = json_bytes(draw(spoilt_value(original)))
    return draw(spoilt_bytes(content)) if draw(st.integers(0, 4)) == 0 else content


@st.composite
def spoilt_file(draw: DrawFn, content: bytes) -> Entry:
    """A file with spoilt content, or something else in its place. JSON is spoilt by its values."""
    if draw(st.integers(0, 9)) == 0:
        return draw(odd_files)
    if draw(st.booleans()):
        try:
            return draw(spoilt_json(json.loads(content)))
        except ValueError:
            pass
    return draw(spoilt_bytes(content))


@st.composite
def spoilt_folder(draw: DrawFn, files: dict[str, bytes], frequent: Sequence[str] = ()) -> dict[str, Entry]:
    """Changes of one or two files of a folder. frequent: names that are spoilt more often than others."""
    names = [*sorted(files), *(name for name in frequent for _ in range(len(files)))]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    return {name: draw(spoilt_file(files[name])) for name in chosen}
