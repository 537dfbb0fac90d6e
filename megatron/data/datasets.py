"""From config keys to the train, validation and test sets of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.blending import (
    BlendedDataset,
    BlendingKey,
    BlendKey,
    BlendMaps,
    EpochKey,
    OnceKey,
    Phases,
    PhasesKey,
    RepeatedDataset,
    wanted_samples,
    weight_phases,
    weights_by_documents,
)
from megatron.data.errors import DataError
from megatron.data.files import known_sha256
from megatron.data.index_cache import CacheKey, Entry, Makers, cached, load
from megatron.data.index_maps import Begun, IndexKey, IndexMaps, LaidOut, stretches, whole_windows
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import open_labels, open_rewards
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import build_maps, packing_of
from megatron.data.packing_efficiency import fullness_note
from megatron.data.preferences.preference_dataset import AnswerDataset
from megatron.data.preferences.reference_scores import ReferencedDataset
from megatron.data.sampler import data_seed
from megatron.data.storage import open_dataset
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.losses import sample_kind
from megatron.neox_arguments.reading.locations import is_remote

NAMES = ("train", "valid", "test")
THREADS = 8  # sets hashed and mapped at once: of blends of thousands, much of the time is waiting for the disk

SampleSet = PackedDataset | BlendedDataset | RepeatedDataset | AnswerDataset | ReferencedDataset


@dataclass(frozen=True)
class MadeOf:
    """All that decides the rows of a set. layout: a digest of labels, keys and order; files: of the tokens, whose
    hashes are kept in the folder `notes`."""

    layout: str
    files: tuple[Path, ...]
    notes: Path


@dataclass(frozen=True)
class Datasets:
    """The sets of one run; None where the split leaves no document or nothing is asked of the set. notes: lines on
    them for the start of the log; laid_out: as in `Begun`."""

    train: SampleSet | None
    valid: SampleSet | None
    test: SampleSet | None
    notes: tuple[str, ...] = ()
    made_of: Mapping[str, MadeOf] = field(default_factory=dict)  # of sets of answers, by name
    laid_out: LaidOut = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """Sequences [first, last) of one `.bin/.idx` pair, and how many samples are wanted of them. before: as
    `build_packed`."""

    indexed: IndexedDataset
    first: int
    last: int
    num_samples: int
    origin: str
    labels: IndexedDataset | None = None
    rewards: IndexedDataset | None = None
    labels_sha256: str | None = None  # where labels decide which documents there are
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """One set: its parts, blended by weight when there are several, and how many samples are wanted in all; with
    epochs, all samples of the parts, this many times; with once, each of them once, by weight; with phases, weights
    that change on the way."""

    name: str
    parts: tuple[_Part, ...]
    weights: tuple[float, ...]
    num_samples: int
    epochs: int | None = None
    phases: Phases = ()
    once: bool = False

    @property
    def key(self) -> BlendingKey:
        """Of the maps that blend the parts."""
        samples = tuple(part.num_samples for part in self.parts)
        if self.phases:
            return PhasesKey(self.phases)
        if self.once:
            return OnceKey(self.weights, samples)
        return BlendKey(self.weights, self.num_samples) if self.epochs is None else EpochKey(samples)


def holds_answers(args: NeoXArgs) -> bool:
    """Whether samples are answers to be compared (`preferences`), not tokens to be predicted."""
    return sample_kind(args) != "texts"


def rows_per_sample(args: NeoXArgs) -> int:
    """Rows of seq_length tokens that a sample has: a pair's answers have one each, unless packed together."""
    return 2 if sample_kind(args) == "pairs" and args.pack_impl != "best_fit" else 1


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


def requested_samples(args: NeoXArgs, train_batch_size: int, begun: Begun) -> tuple[int, int, int]:
    """NeoX's sample counts of the train, validation and test sets; to train, what was consumed and what is to come."""
    evaluations = args.train_iters // args.eval_interval + 1
    return (
        begun.consumed_samples + max(0, args.train_iters - begun.iteration) * train_batch_size,
        evaluations * args.eval_iters * train_batch_size,
        args.eval_iters * train_batch_size,
    )


def epoch_iterations(args: NeoXArgs, train_batch_size: int, begun: Begun | None = None) -> int:
    """Optimizer steps of `train_epochs` passes over the training data; samples that fill no batch are left out. begun:
    of the run that goes on, whose steps so far may have been larger or smaller ones.

    Raises DataError for data that cannot be used, or is less than a batch.
    """
    assert args.train_epochs is not None
    if holds_answers(args):
        from megatron.data.preferences.preference_sets import answer_samples  # which builds on this file

        once = answer_samples(args)
    else:
        (plan,) = (plan for plan in _plans(args, (1, 0, 0), Begun(), args.train_epochs) if plan.name == "train")
        once = plan.num_samples
    samples = args.train_epochs * once
    if samples < train_batch_size:
        raise DataError(
            f"train_epochs: {args.train_epochs} passes over {once} samples do not fill a train_batch_size "
            f"of {train_batch_size}; use more epochs, more data or a smaller batch"
        )
    begun = begun or Begun()
    return begun.iteration + max(0, samples - begun.consumed_samples) // train_batch_size


def index_cache_dir(args: NeoXArgs, prefix: str) -> Path:
    """`index_cache_dir`, else `index_cache` in the `save` folder, else beside the data."""
    if args.index_cache_dir:
        return Path(args.index_cache_dir)
    # A folder that stands for a remote one is each machine's own.
    local = None if is_remote(args.save) else args.save
    return Path(local or Path(prefix).parent) / "index_cache"


def file_notes(args: NeoXArgs, prefix: str) -> Path:
    """Where the hashes of a set's files are kept (`known_sha256`)."""
    return index_cache_dir(args, prefix) / "file_hashes"


def build_datasets(
    args: NeoXArgs,
    *,
    train_batch_size: int,
    once: Callable[[Callable[[], Any]], Any],
    epochs: int | None = None,
    begun: Begun | None = None,
) -> Datasets:
    """The sets of `data_path` + `split`, or of `train/valid/test_data_paths`, several of one list blended by weight.

    once: called on every rank with all work that reads whole files (checks, hashes, the writing of index maps that the
    cache does not hold); it runs that on one rank, gives its result to all, and raises on all what it raised there:
    DataError for data that cannot be used. epochs: the training set is so many passes (`epoch_iterations`). begun: of
    the run that goes on, whose samples keep their order; None: a new run.
    """
    begun = begun or Begun()
    if holds_answers(args):
        from megatron.data.preferences.preference_sets import build_answer_sets  # which builds on this file

        return build_answer_sets(args, train_batch_size=train_batch_size, once=once, epochs=epochs, begun=begun)

    def write() -> tuple[list[_Plan], list[str]]:
        plans = _plans(args, requested_samples(args, train_batch_size, begun), begun, epochs)
        distinct = {id(part.indexed): part.indexed for plan in plans for part in plan.parts}
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda indexed: indexed.index_sha256, distinct.values()))
        for plan in plans:
            cached(_cache(plan, args), _makers(plan, args))
        return plans, [note for plan in plans for note in _notes(plan, args, train_batch_size)]

    plans, notes = once(write)
    sets = {plan.name: _load(plan, args) for plan in plans}
    ends = {
        plan.name: tuple((*part.before, part.num_samples) for part in plan.parts)
        for plan in plans
        if packing_of(args).joint and plan.epochs is None
    }
    return Datasets(sets.get("train"), sets.get("valid"), sets.get("test"), tuple(notes), laid_out=ends)


def _notes(plan: _Plan, args: NeoXArgs, train_batch_size: int) -> list[str]:
    """Lines on the rows of whole documents; of GPT-NeoX's, which mix epochs, there is nothing to say in one."""
    packing = packing_of(args)
    if plan.name != "train" or not packing.whole_documents or packing.compat:
        return []
    entry = _entry(plan, args)
    return [
        fullness_note(
            plan.name, part.indexed, entry.maps(_key(part, args), IndexMaps), packing, args.seq_length, part.labels,
            train_batch_size,
        )
        for part in plan.parts
    ]  # fmt: skip


def data_prefixes(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Set name (or "all" for `data_path`) -> prefixes of its `.bin/.idx` pairs."""
    if args.data_path:
        return {"all": (args.data_path,)}
    lists = zip(NAMES, (args.train_data_paths, args.valid_data_paths, args.test_data_paths), strict=True)
    prefixes = {name: paths for name, paths in lists if paths}
    if "train" not in prefixes:
        raise DataError("no training data: set data_path (with split), or train_data_paths")
    return prefixes


def beside(args: NeoXArgs, name: str) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """The listed labels and rewards of a set, one for each of its paths; None where there are none."""
    labels = (args.train_label_data_paths, args.valid_label_data_paths, args.test_label_data_paths)
    rewards = (args.train_reward_data_paths, args.valid_reward_data_paths, args.test_reward_data_paths)
    return (None, None) if name == "all" else (labels[NAMES.index(name)], rewards[NAMES.index(name)])


def blend_weights(args: NeoXArgs, name: str, members: Sequence[IndexedDataset]) -> tuple[float, ...]:
    """The weights of a set's members."""
    by = "documents" if args.weight_by_num_documents else args.weight_by
    if by is not None:
        sizes = [_size(indexed, by) for indexed in members]
        return weights_by_documents(sizes, args.weighted_sampler_alpha, args.compat_weight_by_num_documents)
    weights = (args.train_data_weights, args.valid_data_weights, args.test_data_weights)[NAMES.index(name)]
    return weights or (1.0,) * len(members)


def _size(indexed: IndexedDataset, unit: str) -> int:
    if unit == "documents":
        return len(indexed)
    tokens = int(indexed.sizes.sum(dtype=np.int64))
    return tokens * (indexed.dtype.itemsize if unit == "bytes" else 1)


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


def _plans(args: NeoXArgs, wanted: tuple[int, int, int], begun: Begun, epochs: int | None = None) -> list[_Plan]:
    prefixes = data_prefixes(args)
    plans = []
    if "all" in prefixes:
        indexed = open_dataset(prefixes["all"][0], args.data_impl)
        borders = split_boundaries(args.split, len(indexed))
        for name, first, end, samples in zip(NAMES, borders, borders[1:], wanted, strict=False):
            last = _limited(args, first, end)
            origin = f'{name} part of split "{args.split}" of {indexed.data_file}'
            plans.append(_Plan(name, (_Part(indexed, first, last, samples, origin),), (1.0,), samples))
    else:
        for name, samples in zip(NAMES, wanted, strict=True):
            if name in prefixes:
                members = [open_dataset(prefix, args.data_impl) for prefix in prefixes[name]]
                for indexed in members:
                    if len(members) > 1 and not len(indexed):
                        raise DataError(f"{indexed.data_file}: no document; take it out of {name}_data_paths")
                weights = blend_weights(args, name, members)
                shares = wanted_samples(weights, samples)
                phases: Phases = ()
                if name == "train" and args.train_data_weight_schedule is not None:
                    phases = _phases(args, samples)
                    shares = [sum(each) for each in zip(*(wanted_samples(w, n) for n, w in phases), strict=True)]
                parts = tuple(
                    _with_labels(
                        _Part(indexed, 0, last, share, f"{indexed.data_file} ({name}_data_paths)"), args, name, i
                    )
                    for i, (indexed, share) in enumerate(zip(members, shares, strict=True))
                    for last in (_limited(args, 0, len(indexed)),)
                )
                plans.append(_Plan(name, parts, weights, samples, phases=phases))
    plans = [_one_pass(plan, args) for plan in plans]
    plans = [plan for plan in plans if plan.num_samples > 0 and plan.parts[0].last > plan.parts[0].first]
    if wanted[0] > 0 and not any(plan.name == "train" for plan in plans):
        raise DataError(f"no document is left for training (data {prefixes}, split {args.split})")
    for plan in plans:
        for part in plan.parts:
            _check_length(plan.name, part, args)
    return [
        _laid_out(plan, args, begun) if epochs is None or plan.name != "train" else _whole_epochs(plan, args, epochs)
        for plan in plans
    ]


def _laid_out(plan: _Plan, args: NeoXArgs, begun: Begun) -> _Plan:
    """The plan in the stretches that its run was begun with, and one more where they are not enough."""
    packing = packing_of(args)
    if not packing.joint or plan.once:
        return plan

    def extended(part: _Part, before: tuple[int, ...]) -> _Part:
        whole: Callable[[int], int] = int
        if packing.windows:
            whole = partial(whole_windows, _tokens(part, args), args.seq_length)
        ends = stretches(before, part.num_samples, whole)
        return replace(part, num_samples=ends[-1], before=ends[:-1])

    parts = (extended(part, begun.stretches(plan.name, member)) for member, part in enumerate(plan.parts))
    return replace(plan, parts=tuple(parts))


def _one_pass(plan: _Plan, args: NeoXArgs) -> _Plan:
    """Of a set to validate with, one pass where rows are whole: no sample counts twice, in a blend neither. Windows of
    joined documents are GPT-NeoX's."""
    packing = packing_of(args)
    if plan.name == "train" or not plan.num_samples or packing.windows or packing.compat:
        return plan
    if len(plan.parts) == 1:
        return replace(plan, parts=(replace(plan.parts[0], num_samples=1),), num_samples=1)
    parts = tuple(replace(part, num_samples=_rows(part, args)) for part in plan.parts)
    return replace(plan, parts=parts, num_samples=sum(part.num_samples for part in parts), once=True)


def _limited(args: NeoXArgs, first: int, last: int) -> int:
    return last if args.limit_samples is None else min(last, first + args.limit_samples)


def _phases(args: NeoXArgs, samples: int) -> Phases:
    schedule = args.train_data_weight_schedule
    assert schedule is not None
    return weight_phases(schedule["until"], schedule["weights"], samples // args.train_iters, samples)


def _with_labels(part: _Part, args: NeoXArgs, name: str, member: int) -> _Part:
    """The part with the labels and rewards that are listed for it."""
    labels, rewards = beside(args, name)
    if labels is not None:
        found = open_labels(labels[member], part.indexed)
        part = replace(part, labels=found)
        if packing_of(args).whole_documents:
            content = known_sha256(found.data_file, file_notes(args, part.indexed.prefix))  # rows depend on every label
            part = replace(part, labels_sha256=content)
    if rewards is not None:
        part = replace(part, rewards=open_rewards(rewards[member], part.indexed))
    return part


def _whole_epochs(plan: _Plan, args: NeoXArgs, epochs: int) -> _Plan:
    """The plan with as many samples as one pass over its parts has."""
    windows = packing_of(args).windows
    parts = [
        replace(part, num_samples=(_tokens(part, args) - 1) // args.seq_length if windows else _rows(part, args))
        for part in plan.parts
    ]
    return _Plan(plan.name, tuple(parts), (), sum(part.num_samples for part in parts), epochs)


def _rows(part: _Part, args: NeoXArgs) -> int:
    """Samples of one epoch."""
    return len(_maps(replace(part, num_samples=1), args).shuffle_idx)


def _tokens(part: _Part, args: NeoXArgs) -> int:
    sizes = part.indexed.sizes[part.first : part.last]
    return int(packing_of(args).lengths(sizes).sum(dtype=np.int64))


def _check_length(name: str, part: _Part, args: NeoXArgs) -> None:
    if part.indexed.dtype.kind not in "iu":
        raise DataError(f"{part.origin}: holds {part.indexed.dtype}, but tokens are integers")
    tokens, seq_length = _tokens(part, args), args.seq_length
    if tokens < seq_length + 1 and packing_of(args).windows:
        raise DataError(
            f"{part.origin}: {tokens} tokens in {part.last - part.first} documents, but one sample takes "
            f"seq_length + 1 = {seq_length + 1}; use more data, another split, or a smaller seq_length"
            + ("" if name == "train" else ", or eval_iters: 0")
        )


def _cache(plan: _Plan, args: NeoXArgs) -> Path:
    return index_cache_dir(args, plan.parts[0].indexed.prefix)


def _makers(plan: _Plan, args: NeoXArgs) -> Makers:
    """Of all maps of a set, which lie in one file."""
    makers: dict[CacheKey, Callable[[], Any]] = {_key(part, args): partial(_maps, part, args) for part in plan.parts}
    return makers if len(plan.parts) == 1 else {**makers, plan.key: plan.key.build}


def _entry(plan: _Plan, args: NeoXArgs) -> Entry:
    return load(_cache(plan, args), _makers(plan, args))


def _key(part: _Part, args: NeoXArgs) -> IndexKey:
    return IndexKey(
        part.indexed.index_sha256,
        part.first,
        part.last,
        part.num_samples,
        args.seq_length,
        data_seed(args),
        packing_of(args),
        part.labels_sha256,
        part.before,
    )


def _maps(part: _Part, args: NeoXArgs) -> IndexMaps:
    wanted, packing = (part.first, part.last, part.num_samples), packing_of(args)
    maps = build_maps(part.indexed.sizes, *wanted, args.seq_length, data_seed(args), packing, part.labels, part.before)
    if len(maps.sample_idx) < 2:
        raise DataError(
            f"{part.origin}: no sample comes of its {part.last - part.first} documents: none has a label to train, is "
            f"short enough (allow_chopped: {args.allow_chopped}), or fills a block of seq_length {args.seq_length} "
            f"(drop_last: {args.drop_last}); use other data, or change these keys"
        )
    return maps


def _load(plan: _Plan, args: NeoXArgs) -> SampleSet:
    entry = _entry(plan, args)

    def member(part: _Part) -> PackedDataset:
        return PackedDataset(
            plan.name,
            part.indexed,
            entry.maps(_key(part, args), IndexMaps),
            args.seq_length,
            args.padded_vocab_size,
            packing=packing_of(args),
            labels=part.labels,
            rewards=part.rewards,
        )

    members = [member(part) for part in plan.parts]
    dataset: PackedDataset | BlendedDataset = members[0]
    if len(members) > 1:
        dataset = BlendedDataset(plan.name, members, entry.maps(plan.key, BlendMaps))
    return dataset if plan.epochs is None else RepeatedDataset(dataset, plan.epochs)
