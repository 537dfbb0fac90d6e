"""Renew `tests/data/signatures/*.json` from unpacked archives of the packages; none is imported or built.

    python -m tests.stand_ins.collect FOLDER...

A folder holds a package under its import name (`flash_attn`, ..) or, of transformer-engine-torch, `csrc`.
Functions and files are those that stand there: a new one is first written there with its file.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data" / "signatures"
_ROOTS = {"transformer_engine_torch": "csrc"}  # where a package's folder has another name


def parameters(source: str, name: str) -> list[list[str]]:
    """`[kind, name, default's text or ""]` of parameters of the last FUNCTION or CLASS[.METHOD], not self."""
    scope: Any = ast.parse(source)
    for part in [*name.split("."), "__init__"]:
        kinds = (ast.FunctionDef, ast.ClassDef)
        if part != "__init__" or isinstance(scope, ast.ClassDef):
            scope = [node for node in ast.walk(scope) if isinstance(node, kinds) and node.name == part][-1]
    args = scope.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    kind = "POSITIONAL_OR_KEYWORD"
    rows = [
        [kind, parameter.arg, ast.unparse(d) if d else ""] for parameter, d in zip(positional, defaults, strict=True)
    ]
    rows = rows[1:] if rows and rows[0][1] == "self" else rows
    for parameter, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        rows.append(["KEYWORD_ONLY", parameter.arg, ast.unparse(default) if default else ""])
    if args.kwarg is not None:
        rows.append(["VAR_KEYWORD", args.kwarg.arg, ""])
    return rows


def bound_parameters(pybind: str, header: str, name: str) -> list[list[str]]:
    """As `parameters`, of a function in C++: by pybind's names, else by the header's, which callers lack."""
    line = re.search(rf'm\.def\("{name}",.*?\);', pybind, re.DOTALL)
    assert line is not None, name
    names = re.findall(r'py::arg\("(\w+)"\)', line[0])
    if names:
        return [["POSITIONAL_OR_KEYWORD", parameter, ""] for parameter in names]
    declared = re.search(rf"\b{name}\((.*?)\);", header, re.DOTALL)
    assert declared is not None, name
    return [["POSITIONAL_ONLY", part.split()[-1].strip("&*"), ""] for part in declared[1].split(",")]


def collect(folder: Path) -> None:
    """Write the signatures of the package in this folder."""
    name = next(path.stem for path in FOLDER.glob("*.json") if (folder / _ROOTS.get(path.stem, path.stem)).is_dir())
    version, functions = _version(folder, name), json.loads((FOLDER / f"{name}.json").read_text())["functions"]
    for function, entry in functions.items():
        text = (folder / entry["file"]).read_text()
        if name in _ROOTS:
            entry["parameters"] = bound_parameters(text, (folder / "csrc/extensions.h").read_text(), function)
        else:
            entry["parameters"] = parameters(text, function)
    lines = json.dumps({"package": name, "version": version, "functions": functions}, indent=1)
    lines = re.sub(r"\[\s+(\"[^\[\]]*?\")\s+\]", lambda match: f"[{' '.join(match[1].split())}]", lines)
    (FOLDER / f"{name}.json").write_text(lines + "\n")


def _version(folder: Path, name: str) -> str:
    if name == "apex":
        return (folder / "COMMIT").read_text().strip()
    texts = [path.read_text() for path in (*folder.glob("PKG-INFO"), *folder.glob("*.dist-info/METADATA"))]
    return re.findall(r"^Version: (\S+)", texts[0], re.MULTILINE)[0]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        collect(Path(argument))
