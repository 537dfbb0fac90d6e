"""Reads prompts to continue from a file, or makes empty prompts, and tokenizes them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.tokenizer import Tokenizer

NOT_STARTED = "WARNING: text generation did not start: the first token ended the document"


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    context: the text.
    tokens: the token ids of the text, at least one; empty if the prompt is skipped.
    message: a warning for the output file; None: no warning.
    """

    context: str
    tokens: list[int]
    message: str | None = None


def read_prompts(args: NeoXArgs, tokenizer: Tokenizer) -> list[Prompt]:
    """Returns the prompts in the file `sample_input_file`, or, for `text_gen_type: unconditional`,
    `num_samples` empty prompts.

    Raises ConfigError if the file cannot be read or holds no prompt, or if a prompt is too long and
    `eval_overlong` is `refuse`.
    """
    texts = [""] * args.num_samples if args.text_gen_type == "unconditional" else _prompt_texts(args)
    prompts = make_prompts(texts, args, tokenizer)
    too_long = [i for i, prompt in enumerate(prompts) if prompt.message is not None]
    if not too_long:
        return prompts
    if args.eval_overlong == "refuse":
        raise args.error(
            "sample_input_file",
            f"{len(too_long)} prompts, the first of them number {too_long[0] + 1}, are too long for the model with "
            f"maximum_tokens {args.maximum_tokens} (eval_overlong: refuse); shorten them, or set eval_overlong to "
            "truncate_left or skip",
        )
    action = "their beginnings are left out"
    if args.eval_overlong == "skip":
        action = "they are skipped"
        for i in too_long:
            prompts[i] = Prompt(prompts[i].context, [], "skipped: too long (eval_overlong: skip)")
    logging.getLogger("megatron").info(
        f"{len(too_long)} of {len(prompts)} prompts are too long for the model: {action}"
    )
    return prompts


def make_prompts(texts: Sequence[str], args: NeoXArgs, tokenizer: Tokenizer) -> list[Prompt]:
    """Returns a `Prompt` for each text.

    A prompt that leaves no room for `maximum_tokens` new tokens is truncated on the left, and gets a warning
    as message. An empty text becomes the end-of-document token, after which a new document begins.
    """
    positions = args.max_position_embeddings - (args.opt_pos_emb_offset if args.pos_emb == "learned" else 0)
    max_prompt_tokens = positions - args.maximum_tokens
    prompts = []
    for text, tokens in zip(texts, tokenizer.tokenize_batch(texts), strict=True):
        message = None
        if len(tokens) > max_prompt_tokens:
            message = (
                f"WARNING: only the last {max_prompt_tokens} of the context's {len(tokens)} tokens were used; the "
                f"model has {positions} positions and maximum_tokens is {args.maximum_tokens}"
            )
        prompts.append(Prompt(text, tokens[-max_prompt_tokens:] or [tokenizer.eod], message))
    return prompts


def _prompt_texts(args: NeoXArgs) -> list[str]:
    file, key = str(args.sample_input_file), "sample_input_file"
    try:
        content = Path(file).read_text(encoding="utf-8")
    except OSError as cause:
        raise args.error(key, f"{file}: cannot be read ({cause.strerror})") from cause
    except UnicodeDecodeError as cause:
        raise args.error(key, f"{file}: is not UTF-8 text (byte {cause.start} is invalid)") from cause
    texts = [text for part in content.split(args.prompt_end) if (text := part.strip())]
    if not texts:
        raise args.error(key, f"{file}: holds no prompt (prompts are separated by prompt_end {args.prompt_end!r})")
    return texts


def read_key_file(args: ModelArgs, key: str) -> str:
    """Returns the text of the file that the configuration key `key` names. Raises ConfigError if the file
    cannot be read."""
    file = getattr(args, key)
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise args.error(key, f"{file}: cannot be read ({cause})") from cause


def system_prompt(args: NeoXArgs) -> str | None:
    """Returns the text of the file `system_prompt_file`; None if the key is not set. Raises ConfigError if
    the file cannot be read."""
    return None if args.system_prompt_file is None else read_key_file(args, "system_prompt_file").strip()
