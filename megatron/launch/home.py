"""Where everything around the package is: the folder of a clone, or what a wheel brings beside it."""

from pathlib import Path


def home() -> Path:
    """The folder of deepy.py, train.py, `tools/`, `configs/` and `slurm/`: a clone's own, else `neox/` beside
    an installed `megatron/`, where setup.py puts them."""
    around = Path(__file__).resolve().parents[2]
    return around if (around / "deepy.py").is_file() else around / "neox"
