"""Builds the tokenizer of a run or a command, and computes the padded vocabulary size of the embedding."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.json_text import parse_json
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
    """Return a tokenizer of one of NeoX's kinds. Raises TokenizerError for a missing file, token or package.

    kind: as in the key `tokenizer_type`. eod_token: the token that ends documents; None: the tokenizer's own.
    """
    if kind not in KINDS:
        raise TokenizerError(f"tokenizer_type {kind}: unknown; choose from {', '.join(KINDS)}")
    if kind == "CharLevelTokenizer":
        if eod_token is not None:
            raise TokenizerError("CharLevelTokenizer always ends documents with id 0; remove eod_token")
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
    """Return the tokenizer of a run, built from the keys tokenizer_type, vocab_file, merge_file and
    eod_token."""
    return make_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file, args.eod_token)


def padded_vocab_size(vocab_size: int, divisor: int, tp: int) -> int:
    """Return `vocab_size` rounded up to a multiple of `divisor` that divides equally over `tp`
    tensor-parallel ranks.

    Padding rows take part in the softmax, so their number should not depend on the parallel layout. GPT-NeoX
    rounds to divisor * tp, so its loss depends on tp. For GPT-NeoX's checkpoints their own size is used
    instead.
    """
    multiple = math.lcm(divisor, tp)
    return -(-vocab_size // multiple) * multiple


def with_vocabulary(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """Return the configuration with `padded_vocab_size` set, unless it was set already.

    Raises ConfigError if the configured value is smaller than the tokenizer's vocabulary.
    """
    if args.padded_vocab_size is None:
        padded = padded_vocab_size(tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tp)
        return args.replace(padded_vocab_size=padded)
    if args.padded_vocab_size < tokenizer.vocab_size:
        small = (
            f"{args.padded_vocab_size} is below the tokenizer's vocabulary, {tokenizer.vocab_size}; raise or remove it"
        )
        raise args.error("padded_vocab_size", small)
    return args


def with_masked_ids(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """Return the configuration with the texts in `loss_mask_token_ids` replaced by token ids.

    The ids are in ascending order, without repetitions. Raises ConfigError for an id outside the vocabulary,
    for a text that is not one token, and for `auto` with a tokenizer that lists no such tokens.
    """
    if not args.loss_mask_token_ids:
        return args
    names, ids = {name: i for i, name in tokenizer.special_tokens.items()}, set()
    tokens = _listed_masked_ids(args) if args.loss_mask_token_ids == "auto" else args.loss_mask_token_ids
    for token in tokens:
        if isinstance(token, str):
            token_ids = [names[token]] if token in names else list(tokenizer.tokenize_bare(token))
            if len(token_ids) != 1:
                problem = f'"{token}" is {len(token_ids)} tokens {token_ids}, not one; write token ids instead'
                raise args.error("loss_mask_token_ids", problem)
            ids.update(token_ids)
        elif 0 <= token < tokenizer.vocab_size:
            ids.add(token)
        else:
            problem = f"{token} is not a token: the vocabulary has {tokenizer.vocab_size}, so ids end at "
            raise args.error("loss_mask_token_ids", f"{problem}{tokenizer.vocab_size - 1}")
    resolved = args.replace(loss_mask_token_ids=sorted(ids))
    return replace(resolved, origins=args.origins)  # so that an error names the line in the user's file


def _listed_masked_ids(args: NeoXArgs) -> list[int | str]:
    """Return the field `loss_mask_token_ids` of the tokenizer's tokenizer_config.json."""
    vocab = Path(args.vocab_file or "")
    file = (vocab if vocab.is_dir() else vocab.parent) / "tokenizer_config.json"
    advice = "list the tokens in loss_mask_token_ids, or remove the key"
    try:
        tokens = parse_json(file.read_text(encoding="utf-8"))["loss_mask_token_ids"]
    except (OSError, ValueError, TypeError, KeyError) as cause:
        reason = "has no field loss_mask_token_ids" if isinstance(cause, KeyError | TypeError) else "cannot be read"
        raise args.error("loss_mask_token_ids", f"auto: {file} {reason}; {advice}") from cause
    if not isinstance(tokens, list) or not all(type(token) in (int, str) for token in tokens):
        raise args.error("loss_mask_token_ids", f"auto: {file} has {tokens!r}, which is no list of tokens; {advice}")
    return tokens


def describe(tokenizer: Tokenizer, padded: int) -> str:
    """Return a log line on a tokenizer: vocabulary size, padding of the embedding to `padded` rows, and
    special tokens."""
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
