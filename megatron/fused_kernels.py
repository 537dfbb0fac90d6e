"""GPT-NeoX's compiled kernels, which are not needed here: attention and norms are torch's own, already
compiled.

Programs written for GPT-NeoX import this module and call its functions before they build a model; nothing is
built, loaded or set by them.
"""

from typing import Any


def load(neox_args: Any = None) -> None:
    """Return at once: there is nothing to compile."""


def load_fused_kernels() -> None:
    """Return at once: there is nothing to load."""
