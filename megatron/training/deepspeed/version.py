"""DeepSpeed versions that are refused because they compute wrong gradients."""

from __future__ import annotations

from importlib.metadata import version

from megatron.neox_arguments.deepspeed_versions import FIX, wrong_deepspeed


def check_version(installed: str) -> None:
    """Raise RuntimeError for a DeepSpeed that is known to train wrongly, or older than was ever checked."""
    wrong = wrong_deepspeed(installed)
    if wrong is not None:
        raise RuntimeError(f"{wrong}; {FIX}")


def check_deepspeed() -> None:
    """`check_version` of the installed DeepSpeed."""
    check_version(version("deepspeed"))
