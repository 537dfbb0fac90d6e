"""Reads, writes and merges LoRA adapters on disk: folders in peft's format, and checkpoints that hold
adapters.

`peft_names.py` maps adapter parameters to tensor names in peft's files, `peft_folder.py` reads and writes
these files. `base.py` reads the base weights, `sources.py` opens adapters of either format, `merging.py`
writes merged weights and adapter checkpoints, `exporting.py` writes peft's format.
"""

from megatron.checkpointing.adapters.base import (
    BaseWeights,
    adapter_model,
    base_record,
    checkpoint_folder,
    family_below,
    known_digests,
    open_base,
    saved_rows,
)
from megatron.checkpointing.adapters.exporting import compare_with_peft, export_peft
from megatron.checkpointing.adapters.merging import compare_merged, write_adapters, write_merged
from megatron.checkpointing.adapters.peft_folder import PeftFolder, is_peft, peft_vocab_size
from megatron.checkpointing.adapters.peft_names import check_peft_names
from megatron.checkpointing.adapters.sources import (
    AdapterSource,
    check_base,
    is_adapter_checkpoint,
    merged_reader,
    open_adapter,
    open_with_base,
)
