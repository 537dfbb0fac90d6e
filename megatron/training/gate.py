"""DeepSpeed versions that are refused because they compute wrong gradients."""

from __future__ import annotations

from importlib.metadata import version

# (first, last, what goes wrong): measured with SGD against one process on SDist releases; Adam hides most of it.
_WRONG = (
    ((0, 16, 0), (0, 18, 2), "pipeline gradients are a sum over micro-batches instead of a mean"),
    ((0, 18, 3), (0, 18, 99), "ZeRO-1 with bf16 leaves gradients unreduced, and pipeline stages divide them again"),
    ((0, 19, 0), (0, 19, 2), "every pipeline stage but the last divides its gradients again by the micro-batches"),
)
_TESTED = (0, 19, 8)


def check_version(installed: str) -> None:
    """Raise RuntimeError for a DeepSpeed that is known to train wrongly, or older than was ever checked."""
    number = tuple(int(part) for part in installed.split("+")[0].split(".")[:3])
    fix = f"pip install deepspeed=={'.'.join(map(str, _TESTED))}"
    for first, last, reason in _WRONG:
        if first <= number <= last:
            raise RuntimeError(f"deepspeed {installed} computes wrong gradients: {reason}; {fix}")
    if number < _WRONG[0][0]:
        raise RuntimeError(f"deepspeed {installed} is older than anything checked here; {fix}")


def check_deepspeed() -> None:
    """`check_version` of the installed DeepSpeed."""
    check_version(version("deepspeed"))
