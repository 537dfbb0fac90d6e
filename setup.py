"""Beside the package a wheel holds `neox/`: what a clone has around it (`megatron.launch.install_root`).

A folder of its own, so that no `tools`, `configs` or `train` lies in site-packages. An editable install needs
none.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

AROUND = (
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
    """build_py, and then the scripts and presets."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "neox")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        for path in sorted(path for pattern in AROUND for path in Path().glob(pattern)):
            if (
                path.is_file()
                and not path.is_symlink()
                and path.name not in LEFT_OUT
                and "__pycache__" not in path.parts
            ):
                self.mkpath(str(folder / path.parent))
                self.copy_file(str(path), str(folder / path), preserve_mode=False)


setup(cmdclass={"build_py": BuildWithScripts})
