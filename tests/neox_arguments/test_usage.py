"""Every key that code reads is declared, and every declared key is read: found out by looking at the code."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import Key, key, keys_of
from megatron.neox_arguments.methods import further_sets, train_impls
from tests.neox_arguments.conftest import ROOT

PACKAGE = ROOT / "megatron" / "neox_arguments"


def sources() -> list[Path]:
    scripts = [ROOT / name for name in ("deepy.py", "train.py", "eval.py", "generate.py")]
    return [path for path in sorted((ROOT / "megatron").rglob("*.py")) if PACKAGE not in path.parents] + scripts


@cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def reads(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """`args.name`, `self.args.name`, `self._args.name` and `getattr(args, "name")`, with their lines.

    `ToyKeys.read_from(args)`, a variable that is set to it, and a parameter of type ToyKeys count as args."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = {
                name for node in ast.walk(function) if isinstance(node, ast.Assign) for name in keys_variables(node)
            }
            parameters = [*function.args.args, *function.args.kwonlyargs]
            names |= {
                item.arg for item in parameters if item.annotation and ast.unparse(item.annotation).endswith("Keys")
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                    yield node.attr, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_args(node.value):
            yield node.attr, node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if len(node.args) > 1 and is_args(node.args[0]) and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value), node.lineno


def keys_variables(assign: ast.Assign) -> Iterator[str]:
    """The variables that are set to `ToyKeys.read_from(args)`, alone or in a tuple."""
    for target in assign.targets:
        pairs = [(target, assign.value)]
        if isinstance(target, ast.Tuple) and isinstance(assign.value, ast.Tuple):
            pairs = list(zip(target.elts, assign.value.elts, strict=True))
        yield from (name.id for name, value in pairs if isinstance(name, ast.Name) and is_keys(value))


def is_args(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("args", "_args") or is_keys(node)


def is_keys(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "read_from"


@cache
def reads_of(path: Path) -> tuple[tuple[str, int], ...]:
    return tuple(reads(parsed(path)))


@cache
def resolved_here() -> set[str]:
    """Keys that resolving turns into another value, property or refusal, or reads files by."""
    key_names = {name for name, _ in reads_of(PACKAGE / "validation" / "refusals.py")}
    key_names |= {impl.key for impl in train_impls().values()}
    for node in ast.walk(parsed(PACKAGE / "reading" / "files.py")):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "config.values.get":
            key_names |= {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
    key_names |= {key for further in further_sets().values() for key in (further.data, further.labels, further.storage)}
    owners = {"derive": "values", "ffn_width": "values", "losses": "args"}
    for name, owner in {
        "resolved.py": "self",
        "model_args.py": "self",
        **{f"values/{name}.py": variable for name, variable in owners.items()},
    }.items():
        for node in ast.walk(parsed(PACKAGE / name)):
            match node:
                case ast.Attribute(value=ast.Name(id=value_name), ctx=ast.Load(), attr=key_name) if value_name == owner:
                    key_names.add(key_name)
                case ast.Subscript(value=ast.Name(id=value_name), ctx=ast.Load(), slice=ast.Constant(value=key_name)):
                    key_names |= {str(key_name)} if value_name == owner else set()
    return key_names


def needs_a_reader(declared: Key) -> bool:
    """Not the keys that say why nothing reads them, that repeat another, or have one possible value."""
    if declared.section is not None:
        return any(needs_a_reader(inner) for inner in keys_of(declared.section).values())
    if declared.standing not in ("honoured", "honoured, differs") or declared.same_as is not None:
        return False
    choices = declared.choices[1:] or [object()]
    return len(declared.choices) != 1 and any(declared.refusal(choice) is None for choice in choices)


def test_the_scan_sees_what_it_should():
    tree = ast.parse(
        "args.one\nself.args.two\nself._args.three\ngetattr(args, 'four')\nother.five\nargs.six()\n"
        "def f():\n    x = Keys.read_from(args)\n    x.seven\nKeys.read_from(args).eight\nx.ten\n"
        "def h():\n    u, v = Keys.read_from(args), 1\n    u.eleven\n    v.ten\n"
        "def g(y: ToyKeys, z: Toys):\n    y.nine\n    z.ten"
    )
    names = [name for name, _ in sorted(reads(tree), key=lambda read: read[1])]
    assert names == ["one", "two", "three", "four", "six", "seven", "eight", "eleven", "nine"]
    assert {"precision", "intermediate_size", "lr_decay_fraction"} <= resolved_here()
    assert "tensorboard_dir" not in resolved_here()


def test_every_key_that_is_read_is_declared():
    undeclared = [
        f"{path.relative_to(ROOT)}:{line}: args.{name}"
        for path in sources()
        for name, line in reads_of(path)
        if not hasattr(NeoXArgs, name) and name not in NeoXArgs.__dataclass_fields__
    ]
    assert undeclared == []


def idle(declaration: type, paths: list[Path]) -> list[str]:
    """Declared keys that nothing reads."""
    read = {name for path in paths for name, _ in reads_of(path)} | resolved_here()
    return [name for name, declared in keys_of(declaration).items() if needs_a_reader(declared) and name not in read]


def test_every_declared_key_is_read():
    assert idle(NeoXArgs, sources()) == []


def test_a_dummy_key_and_a_deleted_reader_are_found():
    @dataclass(frozen=True)
    class WithDummy(NeoXArgs):
        dummy_key: int = key(1, "Nothing reads it")

    assert idle(WithDummy, sources()) == ["dummy_key"]
    remaining = [path for path in sources() if path.name not in ("loggers.py",)]
    assert "wandb_project" in idle(NeoXArgs, remaining)


def sub_keys(declaration: type) -> Iterator[tuple[type, Key]]:
    """Every sub-key that somebody must read, with the section it stands in."""
    for declared in keys_of(declaration).values():
        if declared.section is not None:
            for inner in keys_of(declared.section).values():
                if inner.section is None and inner.standing in ("honoured", "honoured, differs"):
                    yield declared.section, inner
            yield from sub_keys(declared.section)


def test_every_sub_key_is_read_by_us_or_known_to_deepspeed():
    """Sections that are handed on whole are fields of DeepSpeed's models; of the others each name is read."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero import config as zero

    handed_on = {
        "ZeroOptimization": zero.DeepSpeedZeroConfig, "OffloadOptimizer": zero.DeepSpeedZeroOffloadOptimizerConfig,
        "OffloadParam": zero.DeepSpeedZeroOffloadParamConfig, "CommsLogger": CommsLoggerConfig,
        "Fp16": DeepSpeedFP16Config,
    }  # fmt: skip
    texts = {
        node.value
        for path in [*sources(), *PACKAGE.rglob("*.py")]
        if path.parent != PACKAGE / "keys"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    idle_ones = []
    for section, declared in sub_keys(NeoXArgs):
        known_names, model = texts, handed_on.get(section.__name__)
        if model is not None:
            known_names = {field.alias for field in model.model_fields.values()} | set(model.model_fields)
        if declared.name not in known_names and len(declared.choices) != 1:
            idle_ones.append(f"{section.__name__}.{declared.name}")
    assert idle_ones == []
