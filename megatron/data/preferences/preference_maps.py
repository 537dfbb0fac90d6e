"""Builds the index maps of preference training, which say which tokens of which responses make each
sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.packing import build_maps

COUNTS = (
    "units",  # pairs or examples that are trained
    "samples",  # samples of one epoch
    "tokens",  # used tokens of all responses
    "untrained",  # units with a response that has no token to train
    "first_untrained",
    "unreached",  # units with a response whose trained tokens are all truncated
    "first_unreached",
    "too_long",  # units left out by allow_chopped: false
    "cut_prompts",
    "cut_prompt_tokens",
    "cut_answers",
    "cut_answer_tokens",
    "shared",  # prefix tokens that are stored once for both responses
    "shareable",  # prefix tokens that chosen and rejected have in common
)

# f(first used token of each document [units, 2], number of tokens to compare [units]) -> how many tokens
# the two documents of each pair have in common at their beginning [units].
CommonPrefixes = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class LengthLimits:
    """The numbers of tokens to which prompts and responses are truncated; None: no limit.

    max_prompt: limit of the prompt (the tokens before the first trained token), whose last tokens are kept.
    max_length: limit of the truncated prompt and the response together, whose first tokens are kept.
    """

    max_length: int | None = None
    max_prompt: int | None = None


@dataclass(frozen=True, eq=False)
class PreferenceMaps(IndexMaps):
    """The `IndexMaps` of preference data, over documents, or over pairs if a pair takes two rows.

    begin: [documents] int64, the first used token of each document.
    size: [documents] int64, the number of used tokens.
    prompt: [documents] int64, how many used tokens precede the first trained token.
    shared: [documents] int64, how many used tokens the row does not repeat, because the document before
      begins with them.
    counts: [14] int64, counts for the log; their names are in `COUNTS`.
    """

    begin: np.ndarray
    size: np.ndarray
    prompt: np.ndarray
    shared: np.ndarray
    counts: np.ndarray


def build_preference_maps(
    sizes: np.ndarray,
    first_trained: np.ndarray,
    num_samples: int,
    seq_length: int,
    seed: int,
    packing: Packing,
    limits: LengthLimits,
    earlier_ends: Sequence[int] = (),
    common_prefixes: CommonPrefixes | None = None,
    least_saving: float = 0.0,
) -> PreferenceMaps:
    """Build the index maps of pairs or KTO examples (units): full epochs with at least `num_samples` samples.

    There may be no row at all.
    sizes: [units, responses], tokens of each document, prompt included.
    first_trained: [units, responses], the first trained token of each document; its size if none is trained.
    earlier_ends: the ends of the earlier segments of the order, in samples (see `build_packed`).
    common_prefixes: f(first used token of each document [units, 2], tokens to compare [units]) -> how many
      tokens the responses of each pair have in common [units]. None: prefixes are never shared.
    least_saving: prefixes are stored once if that saves at least this share of all tokens. It does not change
      which pairs are truncated, and where.
    """
    width = seq_length + 1
    full = sizes.astype(np.int64)
    used_lengths = packing.lengths(full)
    begin = np.zeros_like(full)
    if limits.max_prompt is not None:
        begin = np.where(first_trained < full, np.maximum(0, first_trained - limits.max_prompt), 0)
    remaining = np.maximum(0, used_lengths - begin)
    size = np.minimum(remaining, min(limits.max_length or width, width))
    one_row = packing.pack_impl == "best_fit"
    pairs_in_one_row = one_row and size.shape[1] == 2
    if (
        pairs_in_one_row
    ):  # both responses share the row: each gets half of it, or the room that the other response leaves
        size = np.minimum(size, np.maximum(width // 2, width - size[:, ::-1]))
    trained = (first_trained < full).all(axis=1)
    short = (size == remaining).all(axis=1) if not packing.allow_chopped else np.ones(len(full), bool)
    reached = (first_trained < begin + size).all(axis=1)
    keep = trained & short & reached
    if packing.compat:  # no document is truncated or left out
        begin, size, keep = np.zeros_like(full), full, np.ones(len(full), bool)
    prompt, shared = np.clip(first_trained - begin, 0, size), np.zeros_like(size)
    if pairs_in_one_row and common_prefixes is not None and not packing.compat:
        # The prompt's last token is stored for both answers: its position predicts their first tokens.
        common = common_prefixes(begin, np.where(keep, prompt.min(axis=1), 0))
        shared[:, 1] = np.maximum(0, common - 1)
    shareable = shared.sum()
    if shareable < least_saving * size[keep].sum():
        shared[:] = 0
    lengths = np.where(keep, (size - shared).sum(axis=1) if one_row else size.max(axis=1), 0)
    untruncated = replace(packing, truncate_documents=None)
    if packing.compat or keep.any():
        maps = build_maps(lengths, 0, len(lengths), num_samples, seq_length, seed, untruncated, None, earlier_ends)
    else:
        maps = IndexMaps(np.zeros(0, np.int64), np.zeros((1, 2), np.int64), np.zeros(0, np.uint32))
    if pairs_in_one_row:
        maps = IndexMaps(_documents_of_pairs(maps.doc_idx), maps.sample_idx * 2, maps.shuffle_idx)
    untrained, unreached = np.flatnonzero(~trained), np.flatnonzero(trained & short & ~reached)
    truncated_begin, truncated_end = keep[:, None] & (begin > 0), keep[:, None] & (begin + size < full)
    counts = (
        keep.sum(), len(maps.sample_idx) - 1, size[keep].sum(),
        len(untrained), untrained[0] if len(untrained) else -1,
        len(unreached), unreached[0] if len(unreached) else -1, (trained & ~short).sum(),
        truncated_begin.sum(), begin[truncated_begin].sum(), truncated_end.sum(),
        (full - begin - size)[truncated_end].sum(),
        shared.sum(), shareable,
    )  # fmt: skip
    return PreferenceMaps(
        maps.doc_idx,
        maps.sample_idx,
        maps.shuffle_idx,
        begin.ravel(),
        size.ravel(),
        prompt.ravel(),
        shared.ravel(),
        np.array(counts, np.int64),
    )


def _documents_of_pairs(pairs: np.ndarray) -> np.ndarray:
    """Return the documents 2p and 2p + 1 of each pair p, [2 * pairs]."""
    return (2 * pairs[:, None] + np.arange(2)).ravel()
