"""Tokenizers: one small interface over GPT-NeoX's kinds.

`build_tokenizer(args)` for a run, `make_tokenizer(kind, vocab_file, merge_file, eod_token)` for tools.
"""

from megatron.tokenizer.build import (
    KINDS,
    build_tokenizer,
    describe,
    make_tokenizer,
    padded_vocab_size,
    with_masked_ids,
    with_vocabulary,
)
from megatron.tokenizer.huggingface import HFTokenizer
from megatron.tokenizer.interface import CharLevelTokenizer, Tokenizer, TokenizerError
