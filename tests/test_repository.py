"""Rules of the whole tree: who may import whom, how long files are, which versions are pinned."""

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.training.deepspeed.private_names import PRIVATE_NAMES
from tests import method_files

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    ("process", "pages"), ("neox_arguments",), ("distributed", "mpu", "data", "tokenizer"),
    ("model", "objectives", "checkpointing", "callbacks"),
    ("launch", "training", "generation", "evaluation", "operations", "pipelines"),
    ("methods", "planning"), ("finetuning", "experiments"),
)  # fmt: skip
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
# Rooms that may import less, or one neighbour more, than their floor says.
ALLOWED_IMPORTS = {
    "launch": {"neox_arguments", "process", "distributed"},
    "operations": {"neox_arguments", "process", "pages", "checkpointing", "callbacks"},
    "pipelines": {"neox_arguments", "process", "pages", "data"},
}
NEIGHBOURS = {
    ("mpu", "distributed"), ("checkpointing", "model"), ("callbacks", "model"), ("evaluation", "generation"),
    ("operations", "launch"),  # sites, and what is submitted to Slurm
    ("pipelines", "launch"), ("pipelines", "operations"),  # commands that it starts; jobs, metrics and plots of runs
}  # fmt: skip
ENGINE = Path("megatron/training/deepspeed")  # the one package that knows the engine's library
SOURCES = sorted(ROOT.glob("megatron/**/*.py"))
PROGRAMS = sorted({*ROOT.glob("*.py"), *SOURCES,
                   *(path for place in ("tools", "huggingface", "benchmarks", "post-training", "tests")
                     for path in ROOT.glob(f"{place}/**/*.py"))})  # fmt: skip
# Processes that a run starts and speaks to; nobody types them.
WORKERS = {f"methods/reinforcement/{file}.py" for file in ("rewards/worker", "rewards/sandbox", "environments/host")}


class Facts(NamedTuple):
    """The parts of a file that rules read. attributes: names by a point or as text, with their lines."""

    imports: list[ast.Import | ast.ImportFrom]
    attributes: list[tuple[Any, int]]


@cache
def facts(path: Path) -> Facts:
    """All imports of a file, at its top, for types alone, or inside functions; what it asks objects for."""
    read = Facts([], [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            read.imports.append(node)
        elif isinstance(node, ast.Attribute):
            read.attributes.append((node.attr, node.lineno))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            read.attributes.extend((a.value, node.lineno) for a in node.args if isinstance(a, ast.Constant))
    return read


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, and of what it imports from them."""
    for node in facts(path).imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "megatron" and len(parts) > 1 else None


def test_imports_point_down():
    upwards = []
    for path in SOURCES:
        importing_room = path.relative_to(ROOT / "megatron").parts[0]
        for name in imports(path) if importing_room != "__init__.py" else ():
            imported_room = room(name)
            if imported_room in (None, importing_room) or (importing_room, imported_room) in NEIGHBOURS:
                continue
            allowed = ALLOWED_IMPORTS.get(importing_room, FLOORS)
            if FLOORS[imported_room] >= FLOORS[importing_room] or imported_room not in allowed:
                upwards.append(f"{path} imports {name}")
    assert not upwards


def test_launchers_share_only_the_store():
    """The store needs no torch until it is made."""
    names = {name for path in ROOT.glob("megatron/launch/**/*.py") for name in imports(path)}
    shared = {name for name in names if name.startswith("megatron.distributed")}
    assert shared and all(name.startswith("megatron.distributed.store") for name in shared)


def test_training_reads_no_preprocessing_or_inspection():
    """Commands and tools import these by name; what a run imports stays what a run needs."""
    excluded = {("data", "preprocessing"), ("data", "inspection"), ("data", "cleaning")}
    for path in SOURCES:
        package = path.relative_to(ROOT / "megatron").parts
        # generation renders chat templates within a time limit; finetuning prepares data before its run
        if package[:2] in excluded or package[0] in ("generation", "finetuning"):
            continue
        for name in imports(path):
            assert tuple(name.split(".")[1:3]) not in excluded, f"{path} imports {name}"


def modules_imported(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Returns members of `modules` that a file imports."""
    names = set()
    for node in facts(path).imports:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module and node.level == 0:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in modules else node.module for name in submodules}
    return names & modules.keys()


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_no_modules_import_each_other_in_a_circle(package):
    paths = ROOT.glob(f"megatron/{package}/**/*.py")
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    graph = {name: modules_imported(path, modules) - {name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(f"{' imports '.join(reversed(circle.args[1]))}: move what both need below them")


def test_circles_are_found(tmp_path):
    for name, text in {"a": "def late():\n    from pack import b\n", "b": "import pack.a\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    modules = {f"pack.{path.stem}": path for path in tmp_path.iterdir()}
    assert {name: modules_imported(path, modules) for name, path in modules.items()} == {
        "pack.a": {"pack.b"}, "pack.b": {"pack.a"},
    }  # fmt: skip


def test_one_package_imports_deepspeed():
    users = [path.relative_to(ROOT) for path in SOURCES if any(re.match(r"deepspeed\b", n) for n in imports(path))]
    assert users and {path.parent for path in users} == {ENGINE}


def test_one_package_knows_deepspeeds_objects():
    names = {private.name.removesuffix("()") for private in PRIVATE_NAMES}
    engine_names = {name for path in ROOT.glob(f"{ENGINE}/*.py") for name, _ in facts(path).attributes}
    assert {"_take_model_step", "ds_numel", "_hp_mapping"} <= names & engine_names
    for path in SOURCES:
        if path.relative_to(ROOT).parent != ENGINE:
            path_uses = facts(path).attributes
            assert not [use for use in path_uses if use[0] in names or re.match(r"_?ds_|_ds$", str(use[0]))], path


def test_one_file_chooses_the_engine():
    users = {p.name for p in SOURCES if any(n.startswith("megatron.training.deepspeed") for n in imports(p))
             if p.relative_to(ROOT).parent != ENGINE}  # fmt: skip
    assert users == {"engine_choice.py"}


def test_configuration_imports_no_torch():
    for path in ROOT.glob("megatron/neox_arguments/**/*.py"):
        assert not any(re.match(r"(torch|deepspeed)\b", name) for name in imports(path)), path


def test_no_file_has_grown_two_jobs():
    files = [*ROOT.glob("*.py"), *SOURCES, *ROOT.glob("tools/**/*.py"), *ROOT.glob("tests/**/*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > 500}
    assert not long


def makes_a_parser(node: ast.AST) -> bool:
    """Whether code calls `argparse.ArgumentParser`, or makes a class of it."""
    classes = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
    return any("ArgumentParser" in (getattr(name, "attr", ""), getattr(name, "id", "")) for name in classes)


@pytest.mark.parametrize("name", method_files.methods())
def test_few_files_know_of_a_kind_of_training(name):
    method = method_files.methods()[name]
    files = method_files.files_that_know(method)
    assert len(files) <= method.max_files, files


def test_the_count_sees_imports_keys_and_names(tmp_path):
    method = method_files.Method("^toy_|Toy", "methods\\.toy", "megatron/methods/toy", 0)
    texts = {"megatron/methods/toy/method.py": "toy_loss = 1", "megatron/a.py": "# toy_loss\nx = 'a toy_loss'",
             "megatron/b.py": "from megatron.methods.toy import x", "megatron/c.py": "x = args.toy_loss",
             "megatron/d.py": "class ToyBatch: pass", "megatron/e.py": "KEYS = ('toy_loss',)"}  # fmt: skip
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert method_files.files_that_know(method, tmp_path) == [f"megatron/{name}.py" for name in "bcde"]


def test_one_class_of_parsers_takes_no_abbreviated_flag():
    texts = {path: path.read_text("utf-8") for path in PROGRAMS}
    trees = {path: ast.parse(text) for path, text in texts.items() if "ArgumentParser" in text}
    makers = {path for path, tree in trees.items() if any(map(makes_a_parser, ast.walk(tree)))}
    assert makers == {ROOT / "megatron/process/command_parser.py"}, "make a CommandParser instead"


def test_every_command_ends_in_one_way():
    """At a closed pipe too: what is typed runs its main within `run_command`."""
    num_commands = 0
    for path in PROGRAMS:
        if path.is_relative_to(ROOT / "tests") or str(path.relative_to(ROOT)).removeprefix("megatron/") in WORKERS:
            continue
        text = path.read_text("utf-8")
        if (begin := text.rfind('if __name__ == "__main__":\n')) >= 0:
            num_commands += 1
            assert "run_command(" in text[begin:], path
    assert num_commands > 60
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"neox": "megatron.launch.command:command"}


def test_versions_are_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"] == "2.13.0", "without a local version, so that every build of it fits"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["deepspeed"] == [f"deepspeed=={pins['deepspeed']}"], "no run on the native engine needs it"
    pinned = [name for extra in ("data", "dev", "wandb", "comet", "nvml", "serve") for name in extras[extra]]
    for requirement in [*project["dependencies"], *pinned]:
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)
        assert name and (name.group().lower() in pins or name.group() == "neox"), requirement


def test_keys_and_tokens_are_not_committed():
    """Jobs read .env of the repository's folder."""
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
