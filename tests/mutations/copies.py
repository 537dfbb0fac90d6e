"""A copy of the tracked tree, in which one mistake at a time is made."""

import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.mutations.anchor import Tree
from tests.mutations.mistakes import Mistake

COMPILED = ("__pycache__", "fake_cuda")


class Copy:
    """A repository of its own, since tests ask git for the tree's files. Removed on `close`."""

    def __init__(self, source: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mutations-"))
        file_list = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, file_list.split("\0")):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (source / name).exists():
                shutil.copy2(source / name, target, follow_symlinks=False)
        _git(self.root, "init", "--quiet")
        _git(self.root, "add", "--all", "--force")
        _git(self.root, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "-m", "As it is")

    def restore(self) -> None:
        """Every file as it was; what tests left behind goes, above all cached index maps, which would hide or
        keep a mistake. What is compiled is named by its content, and stays."""
        _git(self.root, "checkout", "--quiet", "--force", ".")
        _git(self.root, "clean", "-dxfq", *(f"--exclude={name}" for name in COMPILED))

    @contextlib.contextmanager
    def with_mistake(self, mistake: Mistake) -> Iterator[str]:
        """The changed file's path, relative to the root. Raises NoLongerApplies."""
        self.restore()
        path, text = Tree(self.root).changed(mistake)
        compiled = Path(importlib.util.cache_from_source(str(path)))
        path.write_text(text, encoding="utf-8")
        compiled.unlink(missing_ok=True)  # it is dated in seconds, within which a file may change twice
        try:
            yield str(path.relative_to(self.root))
        finally:
            self.restore()
            compiled.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout
