"""Checkpoints in GPT-NeoX's layout: names, checksums, atomic publishing, and weights at any tensor-parallel size.

Nothing here talks to other ranks or to DeepSpeed: the engine calls these functions and does the waiting.
"""

from megatron.checkpointing.changes import Change, responsible, told
from megatron.checkpointing.configuration import export_args
from megatron.checkpointing.errors import CheckpointError, DamagedError, NonFiniteStateError
from megatron.checkpointing.files import (
    FileRecord,
    load_tensors,
    open_own,
    readable_size,
    replace_file,
    save_tensors,
    write_bytes,
)
from megatron.checkpointing.finite import check_finite, verify_finite
from megatron.checkpointing.layout import (
    find_checkpoint,
    layer_file,
    list_checkpoints,
    model_file,
    optimizer_file,
    read_latest,
    step_of,
    step_tag,
    zero_file,
)
from megatron.checkpointing.manifest import (
    Layout,
    Manifest,
    check_model,
    config_key,
    model_keys,
    read_manifest,
    saved_model,
    verify,
)
from megatron.checkpointing.neox_optimizer import NeoXOptimizer
from megatron.checkpointing.optimizer_files import MASTER, OptimizerFiles
from megatron.checkpointing.publish import begin, publish
from megatron.checkpointing.resharding import reshard
from megatron.checkpointing.retention import EPHEMERAL, Retention
from megatron.checkpointing.rng import restore_rng, rng_state, seed_generators
from megatron.checkpointing.weights import SourceFacts, describe_files, load_weights, local_layer_state

__all__ = [
    "Change",
    "CheckpointError",
    "DamagedError",
    "EPHEMERAL",
    "FileRecord",
    "Layout",
    "MASTER",
    "Manifest",
    "NeoXOptimizer",
    "NonFiniteStateError",
    "OptimizerFiles",
    "Retention",
    "SourceFacts",
    "begin",
    "check_finite",
    "check_model",
    "config_key",
    "describe_files",
    "export_args",
    "find_checkpoint",
    "layer_file",
    "list_checkpoints",
    "load_tensors",
    "load_weights",
    "local_layer_state",
    "model_file",
    "model_keys",
    "open_own",
    "optimizer_file",
    "publish",
    "read_latest",
    "read_manifest",
    "readable_size",
    "replace_file",
    "reshard",
    "responsible",
    "restore_rng",
    "rng_state",
    "save_tensors",
    "saved_model",
    "seed_generators",
    "step_of",
    "step_tag",
    "told",
    "verify",
    "verify_finite",
    "write_bytes",
    "zero_file",
]
