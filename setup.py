"""Builds a wheel that also holds the scripts and presets of a clone, in `neox/`.

`megatron.launch.install_root` finds them. They have a folder of their own, so that no `tools`, `configs`
or `train` lies in site-packages. An editable install needs no such folder.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

BUNDLED_PATTERNS = (
    "*.py",
    "tools/*.py",
    "tools/ckpts/*.py",
    "tools/datasets/*.py",
    "huggingface/*.py",
    "configs/**/*",
    "post-training/**/*",
    "slurm/sites/*.sh",
)
LEFT_OUT = ("setup.py", "retired.py")  # the latter reads a page of the docs, and links are names of it


class BuildWithScripts(build_py):
    """Runs build_py, then copies the scripts and presets."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "neox")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        for path in sorted(path for pattern in BUNDLED_PATTERNS for path in Path().glob(pattern)):
            if (
                path.is_file()
                and not path.is_symlink()
                and path.name not in LEFT_OUT
                and "__pycache__" not in path.parts
            ):
                self.mkpath(str(folder / path.parent))
                self.copy_file(str(path), str(folder / path), preserve_mode=False)


setup(cmdclass={"build_py": BuildWithScripts})
