"""HuggingFace folders: read and written one tensor at a time, imported and exported, and checked against transformers.

What a tensor is called there, and what config.json means, is the knowledge of `families`.
"""

from megatron.checkpointing.configuration import export_args
from megatron.checkpointing.huggingface.exporting import export_hf, recover
from megatron.checkpointing.huggingface.extras import CARRIED, carried_files, declared_stop_token_ids, exported_rows
from megatron.checkpointing.huggingface.folder import HFFolder, find_hf, is_hf
from megatron.checkpointing.huggingface.hub import hub_or_cache
from megatron.checkpointing.huggingface.importing import adopted_rows, import_hf, load_hf_weights
from megatron.checkpointing.huggingface.parity import Parity

__all__ = [
    "CARRIED",
    "HFFolder",
    "Parity",
    "adopted_rows",
    "carried_files",
    "declared_stop_token_ids",
    "export_args",
    "export_hf",
    "exported_rows",
    "find_hf",
    "hub_or_cache",
    "import_hf",
    "is_hf",
    "load_hf_weights",
    "recover",
]
