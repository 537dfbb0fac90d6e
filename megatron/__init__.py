"""A trainer for large language models with tensor, pipeline, sequence and data parallelism.

Reads GPT-NeoX configurations, data and checkpoints. Each sub-package says in its own docstring
what it is for; imports point from higher packages to lower ones only (docs/development.md).
"""

from os.path import isdir
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.experiments.run import Run
    from megatron.neox_arguments import MutableNeoXArgs as NeoXArgs

    __all__ = ["NeoXArgs", "Run"]

# Megatron-Core, installed elsewhere, has this name too: `import megatron.core` finds it behind our own rooms.
_elsewhere: list[str] = extend_path([], __name__)
__path__ += [folder for folder in _elsewhere if folder not in __path__ and isdir(f"{folder}/core")]


def __getattr__(name: str) -> Any:
    """`from megatron import NeoXArgs`, as in GPT-NeoX's programs, or `Run`, read only when asked for."""
    if name == "NeoXArgs":
        from megatron.neox_arguments import MutableNeoXArgs

        return MutableNeoXArgs
    if name == "Run":
        from megatron.experiments.run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
