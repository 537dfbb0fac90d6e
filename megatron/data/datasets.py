"""From config keys to the train, validation and test sets of a run."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.errors import DataError
from megatron.data.gpt2_dataset import PackedDataset
from megatron.data.index_maps import IndexKey, build_packed, cached, load
from megatron.data.indexed_dataset import IndexedDataset, data_path
from megatron.neox_arguments import NeoXArgs

NAMES = ("train", "valid", "test")
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK = 1 << 16


@dataclass(frozen=True)
class Datasets:
    """The sets of one run; None where the split leaves no document or nothing is asked of the set."""

    train: PackedDataset | None
    valid: PackedDataset | None
    test: PackedDataset | None


@dataclass(frozen=True)
class _Part:
    """Sequences [first, last) of one `.bin/.idx` pair, and how many samples are wanted of them."""

    name: str
    indexed: IndexedDataset
    first: int
    last: int
    num_samples: int
    origin: str


def split_boundaries(split: str, size: int) -> tuple[int, int, int, int]:
    """Borders of train, validation and test among `size` documents, for "969, 30, 1" or "949/50/1".

    Rounding is NeoX's: the difference is taken from every border, so that train carries it.
    """
    try:
        parts = [float(part) for part in split.split("," if "," in split else "/")][:3]
    except ValueError:
        raise DataError(f'split: "{split}" is not up to three numbers such as "969, 30, 1"') from None
    total = sum(parts)
    if min(parts) < 0 or not 0 < total < math.inf:
        raise DataError(f'split: "{split}" needs numbers that are not negative, at least one above zero')
    borders = [0]
    for part in parts + [0.0] * (3 - len(parts)):
        borders.append(borders[-1] + round(part / total * float(size)))
    excess = borders[-1] - size
    # max(): with very few documents upstream's rounding can make the first border negative
    train, valid, test = (max(0, border - excess) for border in borders[1:])
    return 0, train, valid, test


def requested_samples(args: NeoXArgs, train_batch_size: int) -> tuple[int, int, int]:
    """NeoX's sample counts of the train, validation and test sets."""
    evaluations = args.train_iters // args.eval_interval + 1
    return (
        args.train_iters * train_batch_size,
        evaluations * args.eval_iters * train_batch_size,
        args.eval_iters * train_batch_size,
    )


def index_cache_dir(args: NeoXArgs, prefix: str) -> Path:
    """`index_cache_dir`, else `index_cache` in the `save` folder, else beside the data."""
    if args.index_cache_dir:
        return Path(args.index_cache_dir)
    return Path(args.save or Path(prefix).parent) / "index_cache"


def build_datasets(
    args: NeoXArgs, *, train_batch_size: int, once: Callable[[Callable[[], None]], None]
) -> Datasets:
    """The sets of `data_path` + `split`, or of `train/valid/test_data_paths` with one prefix each.

    once: called on every rank with the writing of index maps that the cache does not hold; it runs that on one rank,
    lets the others wait, and raises on all what it raised there. Raises DataError on all ranks alike for data that
    cannot be used.
    """
    parts = _parts(args, requested_samples(args, train_batch_size))
    for part in parts:
        _check_length(part, args.seq_length)
    keys = {part.name: _key(part, args) for part in parts}
    caches = {part.name: index_cache_dir(args, part.indexed.prefix) for part in parts}

    def write() -> None:
        for part in parts:
            cached(caches[part.name], keys[part.name], lambda part=part: _maps(part, args))  # type: ignore[misc]

    once(write)
    sets = {
        part.name: PackedDataset(
            part.name,
            part.indexed,
            load(caches[part.name], keys[part.name]),
            args.seq_length,
            part.first,
            part.last,
        )
        for part in parts
    }
    return Datasets(*(sets.get(name) for name in NAMES))


def data_prefixes(args: NeoXArgs) -> dict[str, str]:
    """Set name (or "all" for `data_path`) -> prefix of its `.bin/.idx` pair."""
    if args.data_path:
        return {"all": args.data_path}
    lists = dict(zip(NAMES, (args.train_data_paths, args.valid_data_paths, args.test_data_paths), strict=True))
    for name, paths in lists.items():
        if paths and len(paths) > 1:
            raise DataError(
                f"{name}_data_paths: {len(paths)} datasets, but blending is not built yet; "
                "give one, or merge them into one .bin/.idx pair"
            )
    if not lists["train"]:
        raise DataError("no training data: set data_path (with split), or train_data_paths")
    return {name: paths[0] for name, paths in lists.items() if paths}


def fingerprint(prefix: str) -> dict[str, str | int]:
    """What identifies a dataset without reading all of it: SHA-256 of the `.idx`, size of the `.bin`, and SHA-256 over
    64 evenly spaced blocks of 64 KiB of the `.bin` (all of it when smaller)."""
    size = data_path(prefix).stat().st_size
    digest = hashlib.sha256()
    with open(data_path(prefix), "rb") as file:
        if size <= FINGERPRINT_BLOCKS * FINGERPRINT_BLOCK:
            digest.update(file.read())
        else:
            for block in range(FINGERPRINT_BLOCKS):
                file.seek((size - FINGERPRINT_BLOCK) * block // (FINGERPRINT_BLOCKS - 1))
                digest.update(file.read(FINGERPRINT_BLOCK))
    return {
        "idx_sha256": IndexedDataset(prefix).index_sha256,
        "bin_bytes": size,
        "bin_blocks_sha256": digest.hexdigest(),
    }


def data_fingerprint(args: NeoXArgs) -> dict[str, dict[str, str | int]]:
    """Set name -> `fingerprint` of its files; independent of where the files lie."""
    return {name: fingerprint(prefix) for name, prefix in data_prefixes(args).items()}


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy in nats of the token frequencies: the loss of the best model that sees no context."""
    counts = np.zeros(1, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 24):
        more = np.bincount(tokens[start : start + (1 << 24)])
        long, short = (more, counts) if len(more) > len(counts) else (counts, more)
        long[: len(short)] += short
        counts = long
    shares = counts[counts > 0] / max(1, len(tokens))
    return float(-(shares * np.log(shares)).sum())


def _parts(args: NeoXArgs, wanted: tuple[int, int, int]) -> list[_Part]:
    prefixes = data_prefixes(args)
    if "all" in prefixes:
        indexed = IndexedDataset(prefixes["all"])
        borders = split_boundaries(args.split, len(indexed))
        parts = [
            _Part(name, indexed, first, last, samples, f'{name} part of split "{args.split}" of {indexed.data_file}')
            for name, first, last, samples in zip(NAMES, borders, borders[1:], wanted, strict=False)
        ]
    else:
        parts = []
        for name, samples in zip(NAMES, wanted, strict=True):
            if name in prefixes:
                indexed = IndexedDataset(prefixes[name])
                # NeoX asks 0.5 % more of each member of a blend, also when it has one member only
                more = math.ceil(samples * 1.0 * 1.005)
                parts.append(_Part(name, indexed, 0, len(indexed), more, f"{indexed.data_file} ({name}_data_paths)"))
    parts = [part for part in parts if part.last > part.first and part.num_samples > 0]
    if args.train_iters > 0 and not any(part.name == "train" for part in parts):
        raise DataError(f"no document is left for training (data {prefixes}, split {args.split})")
    return parts


def _check_length(part: _Part, seq_length: int) -> None:
    tokens = int(part.indexed.sizes[part.first : part.last].sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise DataError(
            f"{part.origin}: {tokens} tokens in {part.last - part.first} documents, but one sample takes "
            f"seq_length + 1 = {seq_length + 1}; use more data, another split, or a smaller seq_length"
            + ("" if part.name == "train" else ", or eval_iters: 0")
        )


def _key(part: _Part, args: NeoXArgs) -> IndexKey:
    return IndexKey(
        part.indexed.index_sha256,
        part.first,
        part.last,
        part.num_samples,
        args.seq_length,
        args.seed,
        args.pack_impl,
    )


def _maps(part: _Part, args: NeoXArgs):
    return build_packed(part.indexed.sizes, part.first, part.last, part.num_samples, args.seq_length, args.seed)
