"""Low-rank adapters on disk (LoRA): peft's format both ways, checkpoints of adapters alone, and merging them.

`peft_names.py` has peft's names from the tables of the families, `peft_folder.py` its files, `base.py` the
weights below adapters, `sources.py` adapters of either kind, `merging.py` and `exporting.py` what is written.
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
