"""The tokenizer of a run or of a command, and the size its embedding takes."""

import math
from collections.abc import Callable
from dataclasses import replace

from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer.huggingface import GPT2BPETokenizer, HFGPT2Tokenizer, HFTokenizer
from megatron.tokenizer.interface import CharLevelTokenizer, Tokenizer, TokenizerError
from megatron.tokenizer.sentencepiece_tokenizer import SPMTokenizer
from megatron.tokenizer.tiktoken_tokenizer import TiktokenTokenizer

ONE_FILE: dict[str, tuple[Callable[[str, str | None], Tokenizer], str]] = {
    "HFTokenizer": (HFTokenizer, "the path of a tokenizer.json, or a folder with one"),
    "SPMTokenizer": (SPMTokenizer, "the path of a SentencePiece .model"),
    "TiktokenTokenizer": (TiktokenTokenizer, "the name of an encoding, such as cl100k_base"),
}
KINDS = ("GPT2BPETokenizer", *ONE_FILE, "HFGPT2Tokenizer", "CharLevelTokenizer")


def make_tokenizer(
    kind: str, vocab_file: str | None = None, merge_file: str | None = None, eod_token: str | None = None
) -> Tokenizer:
    """A tokenizer of one of NeoX's kinds. Raises TokenizerError for a missing file, token or package.

    eod_token: name of the token that ends documents, where it is not the one the tokenizer itself would name.
    """
    if kind not in KINDS:
        raise TokenizerError(f"tokenizer_type {kind}: there is no such kind; there are {', '.join(KINDS)}")
    if kind == "CharLevelTokenizer":
        if eod_token is not None:
            raise TokenizerError("CharLevelTokenizer has no named tokens, documents end with 0: leave eod_token out")
        return CharLevelTokenizer()
    if kind == "HFGPT2Tokenizer":
        return HFGPT2Tokenizer(vocab_file, eod_token)
    if kind in ONE_FILE:
        make, file = ONE_FILE[kind]
        if not vocab_file:
            raise TokenizerError(f"{kind} needs vocab_file (--vocab-file): {file}")
        return make(vocab_file, eod_token)
    for name, value, file in (("vocab", vocab_file, "vocab.json"), ("merge", merge_file, "merges.txt")):
        if not value:
            raise TokenizerError(f"{kind} needs {name}_file (--{name}-file): the path of its {file}")
    assert vocab_file is not None and merge_file is not None
    return GPT2BPETokenizer(vocab_file, merge_file, eod_token)


def build_tokenizer(args: NeoXArgs) -> Tokenizer:
    """The run's tokenizer, from tokenizer_type, vocab_file, merge_file and eod_token."""
    return make_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file, args.eod_token)


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """vocab_size rounded up to a multiple of `divisible_by` that tensor-parallel ranks can share out equally.

    Rows of padding take part in the softmax, so their number must not hang on the layout: GPT-NeoX, which
    rounds to divisible_by * tp, gives another loss for another tp. Its checkpoints say their size, which is
    then taken.
    """
    multiple = math.lcm(divisible_by, tp)
    return -(-vocab_size // multiple) * multiple


def with_vocabulary(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """The configuration with `padded_vocab_size` known. Raises ConfigError when a given one is too small."""
    if args.padded_vocab_size is None:
        padded = padded_vocab_size(tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tp)
        return args.replace(padded_vocab_size=padded)
    if args.padded_vocab_size < tokenizer.vocab_size:
        small = f"{args.padded_vocab_size} is smaller than the tokenizer's vocabulary of {tokenizer.vocab_size}"
        raise args.error("padded_vocab_size", small)
    return args


def with_masked_ids(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """The configuration with `loss_mask_token_ids` as ids, each once, in rising order.

    Raises ConfigError for an id outside the vocabulary, and for a text that is not one token.
    """
    if not args.loss_mask_token_ids:
        return args
    names, ids = {name: i for i, name in tokenizer.special_tokens.items()}, set()
    for token in args.loss_mask_token_ids:
        if isinstance(token, str):
            found = [names[token]] if token in names else list(tokenizer.tokenize_bare(token))
            if len(found) != 1:
                problem = f'"{token}" is {len(found)} tokens {found}, not one; give the ids that are meant'
                raise args.error("loss_mask_token_ids", problem)
            ids.update(found)
        elif token < tokenizer.vocab_size:
            ids.add(token)
        else:
            problem = f"{token} is no token: the vocabulary has {tokenizer.vocab_size}, so ids end at "
            raise args.error("loss_mask_token_ids", f"{problem}{tokenizer.vocab_size - 1}")
    known = args.replace(loss_mask_token_ids=sorted(ids))
    return replace(known, origins=args.origins)  # a refusal names the line that was written


def describe(tokenizer: Tokenizer, padded: int) -> str:
    """One line: size, padding of the embedding (`padded` rows), and the special tokens that were found."""
    roles = {"end of document": tokenizer.eod, "EOS": tokenizer.eos, "BOS": tokenizer.bos, "padding": tokenizer.pad}
    if tokenizer.eos == tokenizer.eod:
        del roles["EOS"]
    role_tokens = ", ".join(
        f"{role} " + ("none" if i is None else f"{tokenizer.special_tokens.get(i, '')} ({i})".lstrip())
        for role, i in roles.items()
    )
    return (
        f"{type(tokenizer).__name__}: {tokenizer.vocab_size} tokens, padded with {padded - tokenizer.vocab_size} dummy "
        f"tokens to {padded}; {role_tokens}"
    )
