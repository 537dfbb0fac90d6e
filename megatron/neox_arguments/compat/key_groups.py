"""GPT-NeoX's groups of keys by its names: `NeoXArgsTokenizer.tokenizer_type` is the default of that key.

Our groups (TokenizerKeys: "Tokenizer") are cut otherwise. Each class here declares every key that GPT-NeoX's
class of that name declares, and the neighbours of those keys.
"""

import functools
from collections.abc import Mapping
from dataclasses import make_dataclass

from megatron.neox_arguments.resolved import ResolvedArgs

_OUR_GROUPS: Mapping[str, tuple[str, ...]] = {
    "NeoXArgsDeepspeedRunner": ("Runner", "Deepspeed"),
    "NeoXArgsDeepspeedConfig": ("Deepspeed", "Batch", "Optimizer", "Precision", "Parallel"),
    "NeoXArgsModel": ("Model", "Precision", "TransformerEngine", "OtherArchitecture", "PostTraining", "Dead"),
    "NeoXArgsMoE": ("MoE",),
    "NeoXArgsLRScheduler": ("Optimizer",),
    "NeoXArgsOptimizer": ("Optimizer", "Made"),
    "NeoXArgsTokenizer": ("Tokenizer", "Model"),
    "NeoXArgsTraining": (
        "Training", "Checkpoint", "Data", "Tokenizer", "Optimizer", "PostTraining", "Unlearning",
        "MuP", "Model", "Made",
    ),
    "NeoXArgsParallelism": ("Parallel", "Made"),
    "NeoXArgsLogging": ("Logging", "Made"),
    "NeoXArgsTextgen": ("Textgen", "Evaluation", "PostTraining"),
    "NeoXArgsOther": ("Parallel", "Training", "Data", "Checkpoint", "Runner", "Dead", "Made"),
}  # fmt: skip


def key_group(name: str, module: str) -> type:
    """GPT-NeoX's group of keys of this name, made when it is first asked for.

    For the `__getattr__` of `module`: raises AttributeError, as a module does, for a name that is none.
    """
    if name in _OUR_GROUPS:
        return _make_group(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


@functools.cache
def _make_group(name: str) -> type:
    ours = {base.__name__.removesuffix("Keys"): base for base in ResolvedArgs.__mro__}
    return make_dataclass(
        name,
        (),
        bases=tuple(ours[group] for group in _OUR_GROUPS[name]),
        namespace={"__module__": __name__},
        frozen=True,
        init=False,
        repr=False,
        eq=False,
    )
