"""Provides all of GPT-NeoX's kinds of tokenizers under one small interface.

`build_tokenizer(args)` makes the tokenizer of a run, `make_tokenizer(kind, vocab_file, merge_file,
eod_token)` that of a tool.
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
