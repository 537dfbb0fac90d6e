"""Tokenizer room: one small interface over the tokenizer kinds of NeoX.

`build_tokenizer(args)` for a run, `make_tokenizer(kind, vocab_file, merge_file)` for tools.
"""

from megatron.tokenizer.tokenizer import (
    CharLevelTokenizer,
    GPT2BPETokenizer,
    HFTokenizer,
    Tokenizer,
    TokenizerError,
    build_tokenizer,
    make_tokenizer,
    padded_vocab_size,
    with_vocabulary,
)

__all__ = [
    "CharLevelTokenizer",
    "GPT2BPETokenizer",
    "HFTokenizer",
    "Tokenizer",
    "TokenizerError",
    "build_tokenizer",
    "make_tokenizer",
    "padded_vocab_size",
    "with_vocabulary",
]
