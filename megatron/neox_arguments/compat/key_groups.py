"""GPT-NeoX's groups of keys by its names: `NeoXArgsTokenizer.tokenizer_type` is the default of that key.

Our groups (TokenizerKeys: "Tokenizer") are divided differently. Each class here declares every key that
GPT-NeoX's class of that name declares, and the other keys of the same groups of ours.
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

    module: name of the module whose `__getattr__` calls this. AttributeError for an unknown name quotes it.
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
