"""GPT-NeoX's groups of keys by its names: `NeoXArgsTokenizer.tokenizer_type` is the default of that key.

Our groups (TokenizerKeys: "Tokenizer") are cut otherwise. Each class here declares every key that GPT-NeoX's class of
that name declares, and the neighbours of those keys.
"""

from collections.abc import Mapping
from dataclasses import make_dataclass

from megatron.neox_arguments.neox_args import NeoXArgs

_OURS = {keys.__name__.removesuffix("Keys"): keys for keys in NeoXArgs.__mro__}
_BASES: Mapping[str, tuple[str, ...]] = {
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
GROUPS: Mapping[str, type] = {
    name: make_dataclass(
        name,
        (),
        bases=tuple(_OURS[base] for base in own),
        namespace={"__module__": __name__},
        frozen=True,
        init=False,
        repr=False,
        eq=False,
    )
    for name, own in _BASES.items()
}
