"""Reads, writes, checks and converts checkpoints on disk, in GPT-NeoX's file layout.

`layout.py` names the files of a checkpoint directory, `manifest.py` describes their content, `opening.py`
checks them before they are read, `publish.py` makes a complete checkpoint visible. `weights.py` reads and
writes weights at any tensor-parallel size, `parameter_names.py` converts parameter names of other programs,
`resharding.py` converts a checkpoint to other parallel sizes. `families/` describes HuggingFace's model
families (one file each), `huggingface/` imports and exports HuggingFace folders. This package does not use
DeepSpeed. Its ranks communicate only to divide the checking of files among themselves.
"""

from megatron.checkpointing.config_changes import ConfigChange, describe_changes, responsible_key
from megatron.checkpointing.errors import CheckpointError, DamagedError, NonFiniteStateError
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
    Manifest,
    ParallelLayout,
    check_model,
    config_key,
    model_keys,
    read_manifest,
    saved_model,
)
from megatron.checkpointing.neox_optimizer import NeoXOptimizer
from megatron.checkpointing.opening import OpenCheckpoint, verify
from megatron.checkpointing.optimizer_files import AVERAGE, MASTER, OptimizerFiles
from megatron.checkpointing.publish import begin_checkpoint, publish
from megatron.checkpointing.resharding import reshard
from megatron.checkpointing.retention import EPHEMERAL, Retention
from megatron.checkpointing.rng import restore_rng, rng_state, seed_generators
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.checkpointing.tensor_files import (
    FileRecord,
    check_finite,
    load_tensors,
    open_lock_file,
    readable_size,
    replace_file,
    save_tensors,
    verify_finite,
    write_bytes,
)
from megatron.checkpointing.weight_files import CheckpointDescription, describe_layout
from megatron.checkpointing.weights import has_score_head, load_weights, local_layer_state
