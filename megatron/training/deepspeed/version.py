"""The DeepSpeed that is installed: refused if it computes wrong gradients, or lacks what is relied on."""

from importlib.metadata import version

from megatron.neox_arguments.deepspeed_versions import FIX, wrong_deepspeed
from megatron.training.deepspeed.private_names import check_private_names


def check_version(installed: str) -> None:
    """Raise RuntimeError for a DeepSpeed that is known to train wrongly, or older than was ever checked."""
    wrong = wrong_deepspeed(installed)
    if wrong is not None:
        raise RuntimeError(f"{wrong}; {FIX}")


def check_deepspeed() -> None:
    """`check_version` and `check_private_names` of the installed DeepSpeed."""
    check_version(version("deepspeed"))
    check_private_names()
