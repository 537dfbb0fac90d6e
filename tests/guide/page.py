"""docs/development.md as data: the recipes with their code blocks, and the links to code."""

import ast
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "development.md"
# What a copy needs to train, to run its tools and to read the tests that recipes name.
COPIED = ("megatron", "tests", "tools", "docs", "configs", "deepy.py", "train.py", "eval.py", "pyproject.toml")


@dataclass(frozen=True)
class Block:
    """A fenced block. language: behind the fence; path: the file named before it or ""; new: it makes it."""

    language: str
    text: str
    path: str = ""
    new: bool = False


def recipes(text: str) -> dict[str, list[Block]]:
    """The blocks of every recipe, by its title. Raises ValueError for one that belongs to no file."""
    section = text.split("\n## Recipes\n", 1)[1].split("\n## ", 1)[0]
    titles = re.split(r"^### (.+)$", section, flags=re.MULTILINE)[1:]
    return {title: _blocks(title, body) for title, body in zip(titles[::2], titles[1::2], strict=True)}


def _blocks(title: str, body: str) -> list[Block]:
    blocks = []
    fenced = re.compile(r"([^\n]*)\n\n?```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    for prose, language, text in fenced.findall(body):
        label = re.search(r"`([\w./-]+)`(, new file)?:$", prose)
        if label is None and language not in ("console", "yaml"):
            raise ValueError(f"{title}: a block of {language} after {prose!r}, which names no file")
        blocks.append(Block(language, text, label[1], bool(label[2])) if label else Block(language, text))
    return blocks


def copy_tree(folder: Path) -> None:
    """The repository as far as `COPIED`, with its times, so that nothing is compiled again."""
    for name in COPIED:
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, folder / name)
        else:
            shutil.copytree(ROOT / name, folder / name)


def apply(block: Block, folder: Path) -> None:
    """Do to the copy what a block says; blocks to run do nothing here, but for `cp`."""
    if block.language == "console":
        for _, source, target in (line.split() for line in block.text.splitlines() if line.startswith("cp ")):
            shutil.copyfile(folder / source, folder / target)
    elif block.new:
        file = folder / block.path
        assert not file.exists(), f"{block.path} already exists"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
    elif block.language == "diff":
        (folder / block.path).write_text(patched((folder / block.path).read_text(), block))


def patched(text: str, block: Block) -> str:
    """The text of a file with the lines of a diff put into their place, which must be one."""
    for hunk in re.split(r"^@@.*\n", block.text, flags=re.MULTILINE):
        lines = hunk.splitlines()
        old_lines = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new_lines = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        if hunk:
            assert text.count(old_lines) == 1, (
                f"{block.path} has these lines {text.count(old_lines)} times:\n{old_lines}"
            )
            text = text.replace(old_lines, new_lines)
    return text


def links(text: str) -> list[tuple[str, str]]:
    """(text, target) of the links to files of the repository."""
    pairs = re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", text)
    return [(label, target.split("#")[0]) for label, target in pairs if "://" not in target and target[0] != "#"]


def defined(path: Path) -> set[str]:
    """Names that a Python file defines at its top level, and `Class.name` of what its classes define."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        names |= _names(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return names


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
