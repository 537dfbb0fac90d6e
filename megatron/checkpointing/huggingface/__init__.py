"""Reads and writes HuggingFace folders one tensor at a time, imports, exports, and compares logits with
transformers.

`megatron.checkpointing.families` describes how each model family names its tensors, and what its config.json
means. A new family is added there.
"""

from megatron.checkpointing.huggingface.companion_files import (
    HF_SUBFOLDER,
    add_tokenizer,
    declared_eos_ids,
    exported_vocab_size,
    read_companion_files,
    reads_same_tokens,
    run_companion_files,
)
from megatron.checkpointing.huggingface.exporting import export_hf, export_plan, recover, unwritten_blocks
from megatron.checkpointing.huggingface.folder import HFFolder, find_hf, has_hf_score, is_hf
from megatron.checkpointing.huggingface.importing import (
    hf_loader,
    import_hf,
    import_plan,
    load_hf_weights,
    vocab_size_from_hf,
)
from megatron.checkpointing.huggingface.logit_check import LogitComparison
