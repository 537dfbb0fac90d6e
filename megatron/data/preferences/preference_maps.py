"""Which tokens of which responses make the samples of preference training: their index maps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.packing import build_maps

COUNTS = (
    "units",  # pairs or examples that are trained
    "samples",  # of one epoch
    "tokens",  # used, of all responses
    "untrained",  # units with a response that has no token to train
    "first_untrained",
    "unreached",  # units with a response whose tokens to train are all cut off
    "first_unreached",
    "too_long",  # units left out by allow_chopped: false
    "cut_prompts",
    "cut_prompt_tokens",
    "cut_answers",
    "cut_answer_tokens",
    "shared",  # tokens of prefixes that are laid out once
    "shareable",  # tokens of prefixes that chosen and rejected have in common
)

# From the first token that is used of each document [units, 2], and how many come before the first trained
# one of either [units], to how many of these begin both alike, [units].
CommonPrefixes = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class LengthLimits:
    """How many tokens of a response and its prompt are used; None: all.

    max_prompt: the last tokens of what stands before the first trained one. max_length: the first tokens of
    that prompt and the response together.
    """

    max_length: int | None = None
    max_prompt: int | None = None


@dataclass(frozen=True, eq=False)
class PreferenceMaps(IndexMaps):
    """`IndexMaps` over documents, or over pairs where a pair takes two rows.

    begin, size [documents] int64: the first token that is used of each document, and how many. prompt
    [documents] int64: how many of these tokens come before the first trained one. shared [documents] int64:
    how many of these tokens are left out of the row, since the document before begins with them. counts [14]
    int64: as named in `COUNTS`.
    """

    begin: np.ndarray
    size: np.ndarray
    prompt: np.ndarray
    shared: np.ndarray
    counts: np.ndarray


def build_preference_maps(
    sizes: np.ndarray,
    first: np.ndarray,
    num_samples: int,
    seq_length: int,
    seed: int,
    packing: Packing,
    limits: LengthLimits,
    before: Sequence[int] = (),
    common_prefixes: CommonPrefixes | None = None,
    least_saving: float = 0.0,
) -> PreferenceMaps:
    """Maps of whole epochs with at least num_samples samples; there may be no row at all.

    sizes [units, responses]: tokens of each document, prompt included. first [units, responses]: the first
    trained token of each; its size where none is trained. before: where the earlier segments of the order
    end, in samples (see `build_packed`). common_prefixes: of pairs in one row, whose prefixes then are laid
    out once, if that leaves out at least the share least_saving of all tokens. Where pairs are cut, and
    whether they are, does not depend on it.
    """
    width = seq_length + 1
    full = sizes.astype(np.int64)
    used = packing.lengths(full)
    begin = np.zeros_like(full)
    if limits.max_prompt is not None:
        begin = np.where(first < full, np.maximum(0, first - limits.max_prompt), 0)
    left = np.maximum(0, used - begin)
    size = np.minimum(left, min(limits.max_length or width, width))
    one_row = packing.pack_impl == "best_fit"
    pairs_in_one_row = one_row and size.shape[1] == 2
    if pairs_in_one_row:  # both responses share the row: each gets half of it, or what the other one leaves
        size = np.minimum(size, np.maximum(width // 2, width - size[:, ::-1]))
    trained = (first < full).all(axis=1)
    short = (size == left).all(axis=1) if not packing.allow_chopped else np.ones(len(full), bool)
    reached = (first < begin + size).all(axis=1)
    keep = trained & short & reached
    if packing.compat:  # all documents as they are
        begin, size, keep = np.zeros_like(full), full, np.ones(len(full), bool)
    prompt, shared = np.clip(first - begin, 0, size), np.zeros_like(size)
    if pairs_in_one_row and common_prefixes is not None and not packing.compat:
        # The last token before the answers stands before each of them: its place predicts their first tokens.
        common = common_prefixes(begin, np.where(keep, prompt.min(axis=1), 0))
        shared[:, 1] = np.maximum(0, common - 1)
    shareable = shared.sum()
    if shareable < least_saving * size[keep].sum():
        shared[:] = 0
    lengths = np.where(keep, (size - shared).sum(axis=1) if one_row else size.max(axis=1), 0)
    whole = replace(packing, truncate_documents=None)
    if packing.compat or keep.any():
        maps = build_maps(lengths, 0, len(lengths), num_samples, seq_length, seed, whole, None, before)
    else:
        maps = IndexMaps(np.zeros(0, np.int64), np.zeros((1, 2), np.int64), np.zeros(0, np.uint32))
    if pairs_in_one_row:
        maps = IndexMaps(_documents_of_pairs(maps.doc_idx), maps.sample_idx * 2, maps.shuffle_idx)
    untrained, unreached = np.flatnonzero(~trained), np.flatnonzero(trained & short & ~reached)
    cut_begin, cut_end = keep[:, None] & (begin > 0), keep[:, None] & (begin + size < full)
    counts = (
        keep.sum(), len(maps.sample_idx) - 1, size[keep].sum(),
        len(untrained), untrained[0] if len(untrained) else -1,
        len(unreached), unreached[0] if len(unreached) else -1, (trained & ~short).sum(),
        cut_begin.sum(), begin[cut_begin].sum(), cut_end.sum(), (full - begin - size)[cut_end].sum(),
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
    """Documents 2p and 2p + 1 of pairs p, [2 * pairs]."""
    return (2 * pairs[:, None] + np.arange(2)).ravel()
