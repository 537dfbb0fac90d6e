"""Every key that code reads is declared, and every declared key is read: found out by looking at the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.declare import Key, keys_of

ROOT = Path(__file__).parents[2]
HERE = ROOT / "megatron" / "neox_arguments"
SCRIPTS = ("deepy.py", "train.py", "eval.py", "generate.py")


def sources() -> list[Path]:
    scripts = [ROOT / name for name in SCRIPTS if (ROOT / name).exists()]
    return [path for path in sorted((ROOT / "megatron").rglob("*.py")) if HERE not in path.parents] + scripts


def reads(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """`args.name`, `self.args.name`, `self._args.name` and `getattr(args, "name")`, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_args(node.value):
            yield node.attr, node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if len(node.args) > 1 and is_args(node.args[0]) and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value), node.lineno


def is_args(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("args", "_args")


def resolved_here() -> set[str]:
    """Keys that resolving turns into another value or property: read in derive.py, ffn.py, neox_args.py."""
    found: set[str] = set()
    for name, owner in (("derive.py", "values"), ("ffn.py", "values"), ("neox_args.py", "self")):
        for node in ast.walk(ast.parse((HERE / name).read_text())):
            if not isinstance(node, ast.Attribute | ast.Subscript):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id == owner and isinstance(node.ctx, ast.Load)):
                continue
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))
    return found


def needs_a_reader(key: Key) -> bool:
    """Not the keys that say why nothing reads them, nor those that have one possible value."""
    if key.section is not None:
        return any(needs_a_reader(inner) for inner in keys_of(key.section).values())
    return key.no_effect is None and key.refuse is None and len(key.choices) != 1


def test_the_scan_sees_what_it_should():
    tree = ast.parse("args.one\nself.args.two\nself._args.three\ngetattr(args, 'four')\nother.five\nargs.six()\n")
    assert [name for name, _ in sorted(reads(tree), key=lambda read: read[1])] == ["one", "two", "three", "four", "six"]
    assert {"precision", "intermediate_size", "lr_decay_fraction"} <= resolved_here()
    assert "tensorboard_dir" not in resolved_here()


def test_every_key_that_is_read_is_declared():
    undeclared = [
        f"{path.relative_to(ROOT)}:{line}: args.{name}"
        for path in sources()
        for name, line in reads(ast.parse(path.read_text()))
        if not hasattr(NeoXArgs, name) and name not in NeoXArgs.__dataclass_fields__
    ]
    assert undeclared == []


def test_every_declared_key_is_read():
    read = {name for path in sources() for name, _ in reads(ast.parse(path.read_text()))} | resolved_here()
    idle = [name for name, key in keys_of(NeoXArgs).items() if needs_a_reader(key) and name not in read]
    assert idle == []
