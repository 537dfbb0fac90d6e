"""Provides GPT-NeoX's groups of keys by their names: `NeoXArgsTokenizer.tokenizer_type` is the key's default.

Our groups are divided differently: "Tokenizer" is the class TokenizerKeys. So each class here joins several
of our groups. It declares every key that GPT-NeoX's class of the same name declares, and further keys of our
groups.
"""

import functools
from collections.abc import Mapping
from dataclasses import make_dataclass

from megatron.neox_arguments.resolved import ResolvedArgs

_KEY_GROUPS: Mapping[str, tuple[str, ...]] = {
    "NeoXArgsDeepspeedRunner": ("Runner", "Deepspeed"),
    "NeoXArgsDeepspeedConfig": ("Deepspeed", "Batch", "Optimizer", "Precision", "Parallel"),
    "NeoXArgsModel": (
        "Model", "Precision", "TransformerEngine", "OtherArchitecture", "PostTraining", "AllMethod", "Dead",
    ),
    "NeoXArgsMoE": ("MoE",),
    "NeoXArgsLRScheduler": ("Optimizer",),
    "NeoXArgsOptimizer": ("Optimizer", "Made"),
    "NeoXArgsTokenizer": ("Tokenizer", "Model"),
    "NeoXArgsTraining": (
        "Training", "Checkpoint", "Data", "Tokenizer", "Optimizer", "PostTraining", "AllMethod", "MuP", "Model", "Made",
    ),
    "NeoXArgsParallelism": ("Parallel", "Made"),
    "NeoXArgsLogging": ("Logging", "Made"),
    "NeoXArgsTextgen": ("Textgen", "Evaluation", "PostTraining", "AllMethod"),
    "NeoXArgsOther": ("Parallel", "Training", "Data", "Checkpoint", "Runner", "Dead", "Made"),
}  # fmt: skip


def key_group(name: str, module: str) -> type:
    """Returns the dataclass of one of GPT-NeoX's key groups, such as `NeoXArgsModel`, built at first use.

    module: name of the module whose `__getattr__` calls this function. Raises AttributeError, which names
    this module, for an unknown name.
    """
    if name in _KEY_GROUPS:
        return _make_group(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


@functools.cache
def _make_group(name: str) -> type:
    key_classes = {base.__name__.removesuffix("Keys"): base for base in ResolvedArgs.__mro__}
    return make_dataclass(
        name,
        (),
        bases=tuple(key_classes[group] for group in _KEY_GROUPS[name]),
        namespace={"__module__": __name__},
        frozen=True,
        init=False,
        repr=False,
        eq=False,
    )
