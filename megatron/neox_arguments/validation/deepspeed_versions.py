"""Lists DeepSpeed versions that compute wrong gradients. The launcher reads the list without loading an
engine."""

# (first, last, what goes wrong): measured with SGD against one process on SDist releases; Adam hides most of
# it.
_WRONG = (
    ((0, 16, 0), (0, 18, 2), "pipeline gradients are a sum over micro-batches instead of a mean"),
    ((0, 18, 3), (0, 18, 99), "ZeRO-1 with bf16 leaves gradients unreduced, and pipeline stages divide them again"),
    ((0, 19, 0), (0, 19, 2), "every pipeline stage but the last divides its gradients again by the micro-batches"),
)
TESTED = "0.19.8"
FIX = f"pip install deepspeed=={TESTED}"
MISSING = "DeepSpeed, which is not installed: pip install 'neox[deepspeed]'"  # the end of a sentence "... needs"


def wrong_deepspeed(installed: str) -> str | None:
    """Returns why a version of DeepSpeed is refused, in words; None if it may train."""
    number = tuple(int(part) for part in installed.split("+")[0].split(".")[:3])
    for oldest, newest, reason in _WRONG:
        if oldest <= number <= newest:
            return f"deepspeed {installed} computes wrong gradients: {reason}"
    if number < _WRONG[0][0]:
        return f"deepspeed {installed} is older than every version that this project has checked"
    return None
