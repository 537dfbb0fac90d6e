"""The sets of language-model training: documents of `.bin/.idx` pairs, packed into rows and blended by
weight.

First every set is planned (which documents, how many samples of each pair), then its index maps are made or
found in the cache by one process, then every process maps them.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
    OnePassKey,
    Phases,
    PhasesKey,
    RepeatedDataset,
    samples_per_member,
    weight_phases,
)
from megatron.data.errors import DataError
from megatron.data.files import cached_sha256
from megatron.data.index_cache import CachedMaps, CacheKey, MapBuilders, ensure_cached, load_cached
from megatron.data.index_maps import DataState, IndexKey, IndexMaps, segment_ends, whole_windows
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import open_labels, open_rewards
from megatron.data.masked_tokens import masked_token_lines
from megatron.data.open_dataset import open_dataset
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import build_maps, packing_from_args
from megatron.data.packing_efficiency import packing_efficiency_line
from megatron.data.run_datasets import Datasets, SampleSet, SetContents
from megatron.data.sampler import data_seed
from megatron.data.set_config import (
    SET_NAMES,
    UNLEARNING_KEYS,
    blend_weights,
    companion_paths,
    data_prefixes,
    hash_cache_dir,
    index_cache_dir,
    masked_token_ids,
    requested_samples,
    split_boundaries,
    storage,
)
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.data_split import cuts_listed_paths
from megatron.neox_arguments.values.unlearning import ascent_steps

THREADS = 8  # pairs hashed at once: of blends of thousands, much of the time is waiting for the disk


@dataclass(frozen=True)
class _TextSource:
    """Sequences [first, last) of one `.bin/.idx` pair, and how many samples are wanted of them.

    origin: what messages call them. labels_sha256: set where labels decide which documents are used. before:
    where the earlier segments of the order end, in samples (see `build_packed`).
    """

    indexed: IndexedDataset
    first: int
    last: int
    num_samples: int
    origin: str
    labels: IndexedDataset | None = None
    rewards: IndexedDataset | None = None
    labels_sha256: str | None = None
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class _TextPlan:
    """One set: its sources, blended by weight when there are several, and how many samples are wanted in all.

    epochs: all samples of the sources, so many times. phases: weights that change on the way. single_pass:
    each sample of the sources once, in the proportion of the weights.
    """

    name: str
    sources: tuple[_TextSource, ...]
    weights: tuple[float, ...]
    num_samples: int
    epochs: int | None = None
    phases: Phases = ()
    single_pass: bool = False

    @property
    def blend_key(self) -> BlendingKey:
        """The key of the maps that blend the sources."""
        samples = tuple(source.num_samples for source in self.sources)
        if self.phases:
            return PhasesKey(self.phases)
        if self.single_pass:
            return OnePassKey(self.weights, samples)
        return BlendKey(self.weights, self.num_samples) if self.epochs is None else EpochKey(samples)


def build_text_sets(
    args: NeoXArgs,
    train_batch_size: int,
    once: Callable[[Callable[[], Any]], Any],
    epochs: int | None,
    data_state: DataState,
) -> Datasets:
    """`build_datasets` for sets of plain or labelled text."""

    def write() -> tuple[list[_TextPlan], list[str]]:
        plans = _plans(args, requested_samples(args, train_batch_size, data_state), data_state, epochs)
        distinct = {id(source.indexed): source.indexed for plan in plans for source in plan.sources}
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda indexed: indexed.index_sha256, distinct.values()))
        for plan in plans:
            ensure_cached(_cache_dir(plan, args), _map_builders(plan, args))
        lines = [line for plan in plans for line in _log_lines(plan, args, train_batch_size)]
        if args.eval_iters and (args.data_path or cuts_listed_paths(args)) and "valid" not in {p.name for p in plans}:
            lines.append(
                f'WARNING: split "{args.split}" leaves no document to validate with, and eval_iters is '
                f"{args.eval_iters}: there is no validation; use more data or another split, or eval_iters: 0"
            )
        return plans, lines

    plans, log_lines = once(write)
    sets = {plan.name: _load(plan, args) for plan in plans}
    ends = {
        plan.name: tuple((*source.before, source.num_samples) for source in plan.sources)
        for plan in plans
        if packing_from_args(args).joint and plan.epochs is None
    }
    contents = {plan.name: _contents(plan, args) for plan in plans if plan.name == "forget"}
    return Datasets(
        sets.get("train"), sets.get("valid"), sets.get("test"), tuple(log_lines), contents, ends,
        sets.get("forget"), sets.get("retain"),
    )  # fmt: skip


def text_samples_per_epoch(args: NeoXArgs) -> int:
    """Training samples of one pass over the data. Raises DataError for data that cannot be used."""
    plans = _plans(args, (1, 0, 0), DataState(), args.train_epochs)
    return next(plan.num_samples for plan in plans if plan.name == "train")


def _plans(
    args: NeoXArgs, wanted: tuple[int, int, int], data_state: DataState, epochs: int | None = None
) -> list[_TextPlan]:
    """The sets that have documents and of which samples are wanted. wanted: samples of train, valid, test."""
    prefixes = data_prefixes(args)
    plans = _split_plans(args, prefixes["all"][0], wanted) if "all" in prefixes else _listed_plans(args, wanted)
    plans = [_one_pass(plan, args) for plan in plans]
    if wanted[0] > 0:
        plans += _unlearning_plans(args, data_state)
    plans = [plan for plan in plans if plan.num_samples > 0 and plan.sources[0].last > plan.sources[0].first]
    if wanted[0] > 0 and not any(plan.name == "train" for plan in plans):
        raise DataError(f"no document is left for training (data {prefixes}, split {args.split})")
    for plan in plans:
        for source in plan.sources:
            _check_length(plan.name, source, args)
    return [
        _whole_epochs(plan, args, epochs)
        if epochs is not None and plan.name == "train"
        else _with_segments(plan, args, data_state)
        for plan in plans
    ]


def _split_plans(args: NeoXArgs, prefix: str, wanted: tuple[int, int, int]) -> list[_TextPlan]:
    """The parts into which `split` divides `data_path`."""
    indexed = open_dataset(prefix, args.data_impl)
    boundaries = split_boundaries(args.split, len(indexed))
    plans = []
    for name, first, end, samples in zip(SET_NAMES, boundaries, boundaries[1:], wanted, strict=False):
        origin = f'{name} part of split "{args.split}" of {indexed.data_file}'
        source = _TextSource(indexed, first, _limited(args, first, end), samples, origin)
        plans.append(_TextPlan(name, (source,), (1.0,), samples))
    return plans


def _listed_plans(args: NeoXArgs, wanted: tuple[int, int, int]) -> list[_TextPlan]:
    """The sets of `train_data_paths`, `valid_data_paths` and `test_data_paths`, or the parts into which
    `split` divides each of the first."""
    prefixes, plans, cut = data_prefixes(args), [], cuts_listed_paths(args)
    for part, (name, samples) in enumerate(zip(SET_NAMES, wanted, strict=True)):
        listed = "train" if cut else name
        if listed not in prefixes:
            continue
        members = [open_dataset(prefix, args.data_impl) for prefix in prefixes[listed]]
        for indexed in members:
            if len(members) > 1 and not len(indexed):
                raise DataError(f"{indexed.data_file}: no document; take it out of {listed}_data_paths")
        ranges = [split_boundaries(args.split, len(each))[part:][:2] if cut else (0, len(each)) for each in members]
        if len(members) > 1 and all(first == last for first, last in ranges):
            continue
        for indexed, (first, last) in zip(members, ranges, strict=True):
            if len(members) > 1 and first == last:
                problem = f"split {args.split} leaves none of its {len(indexed)} documents to {name}"
                raise DataError(f"{indexed.data_file}: {problem}; use another split, or valid_data_paths")
        weights = blend_weights(args, listed, members)
        shares = samples_per_member(weights, samples)
        phases: Phases = ()
        if name == "train" and args.train_data_weight_schedule is not None:
            phases = _phases(args, samples)
            shares = [sum(each) for each in zip(*(samples_per_member(w, n) for n, w in phases), strict=True)]
        sources = []
        for i, (indexed, share) in enumerate(zip(members, shares, strict=True)):
            first, last = ranges[i]
            cited = f'{name} part of split "{args.split}" of ' if cut else ""
            origin = f"{cited}{indexed.data_file} ({listed}_data_paths)"
            source = _TextSource(indexed, first, _limited(args, first, last), share, origin)
            sources.append(_with_companions(source, args, listed, i))
        plans.append(_TextPlan(name, tuple(sources), weights, samples, phases=phases))
    return plans


def _unlearning_plans(args: NeoXArgs, data_state: DataState) -> list[_TextPlan]:
    """The sets to forget and to retain: all documents of each, as often as the steps on them need."""
    if args.ga_dataset is None:
        return []
    prefixes, plans = data_prefixes(args), []
    steps = ascent_steps(args, data_state.iteration, args.train_iters)
    samples = data_state.forget_samples + steps * args.train_batch_size
    for name, (key, _) in UNLEARNING_KEYS.items():
        if name in prefixes:
            indexed = open_dataset(prefixes[name][0], storage(args, name))
            if not len(indexed):
                raise DataError(f"{indexed.data_file}: no document; set {key} to data that has some")
            source = _TextSource(indexed, 0, len(indexed), samples, f"{indexed.data_file} ({key})")
            plans.append(_TextPlan(name, (_with_companions(source, args, name, 0),), (1.0,), samples))
    return plans


def _with_segments(plan: _TextPlan, args: NeoXArgs, data_state: DataState) -> _TextPlan:
    """The plan in the segments that its run was begun with, and one more where they are not enough."""
    packing = packing_from_args(args)
    if not packing.joint or plan.single_pass:
        return plan

    def extended(source: _TextSource, before: tuple[int, ...]) -> _TextSource:
        whole: Callable[[int], int] = int
        if packing.windows:
            whole = partial(whole_windows, _tokens(source, args), args.seq_length)
        ends = segment_ends(before, source.num_samples, whole)
        return replace(source, num_samples=ends[-1], before=ends[:-1])

    sources = (extended(source, data_state.segments(plan.name, i)) for i, source in enumerate(plan.sources))
    return replace(plan, sources=tuple(sources))


def _one_pass(plan: _TextPlan, args: NeoXArgs) -> _TextPlan:
    """A validation or test set of whole rows as one pass, so that no sample counts twice, in a blend neither.

    Windows of joined documents stay as many as GPT-NeoX takes.
    """
    packing = packing_from_args(args)
    if plan.name == "train" or not plan.num_samples or packing.windows or packing.compat:
        return plan
    if len(plan.sources) == 1:
        return replace(plan, sources=(replace(plan.sources[0], num_samples=1),), num_samples=1)
    sources = tuple(replace(source, num_samples=_rows(source, args)) for source in plan.sources)
    samples = sum(source.num_samples for source in sources)
    return replace(plan, sources=sources, num_samples=samples, single_pass=True)


def _limited(args: NeoXArgs, first: int, last: int) -> int:
    """Where sequences [first, last) end when no more than `limit_samples` of them are used."""
    return last if args.limit_samples is None else min(last, first + args.limit_samples)


def _phases(args: NeoXArgs, samples: int) -> Phases:
    schedule = args.train_data_weight_schedule
    assert schedule is not None
    return weight_phases(schedule["until"], schedule["weights"], samples // args.train_iters, samples)


def _with_companions(source: _TextSource, args: NeoXArgs, name: str, member: int) -> _TextSource:
    """The source with the labels and rewards that are listed for it."""
    label_paths, reward_paths = companion_paths(args, name)
    if label_paths is not None:
        labels = open_labels(label_paths[member], source.indexed)
        source = replace(source, labels=labels)
        if packing_from_args(args).whole_documents:  # which rows there are depends on every label
            content = cached_sha256(labels.data_file, hash_cache_dir(args, source.indexed.prefix))
            source = replace(source, labels_sha256=content)
    if reward_paths is not None:
        source = replace(source, rewards=open_rewards(reward_paths[member], source.indexed))
    return source


def _whole_epochs(plan: _TextPlan, args: NeoXArgs, epochs: int) -> _TextPlan:
    """The plan with as many samples as one pass over its sources has."""
    windows = packing_from_args(args).windows
    sources = [
        replace(source, num_samples=(_tokens(source, args) - 1) // args.seq_length if windows else _rows(source, args))
        for source in plan.sources
    ]
    return _TextPlan(plan.name, tuple(sources), (), sum(source.num_samples for source in sources), epochs)


def _rows(source: _TextSource, args: NeoXArgs) -> int:
    """Samples of one epoch."""
    return len(_build_maps(replace(source, num_samples=1), args).shuffle_idx)


def _tokens(source: _TextSource, args: NeoXArgs) -> int:
    """Tokens of one epoch."""
    sizes = source.indexed.sizes[source.first : source.last]
    return int(packing_from_args(args).lengths(sizes).sum(dtype=np.int64))


def _check_length(name: str, source: _TextSource, args: NeoXArgs) -> None:
    """Raise DataError for a source that holds no tokens, or fewer than fill one window."""
    if source.indexed.dtype.kind not in "iu":
        raise DataError(f"{source.origin}: holds {source.indexed.dtype}, but tokens are integers")
    tokens, seq_length = _tokens(source, args), args.seq_length
    if tokens < seq_length + 1 and packing_from_args(args).windows:
        raise DataError(
            f"{source.origin}: {tokens} tokens in {source.last - source.first} documents, but one sample takes "
            f"seq_length + 1 = {seq_length + 1}; use more data, another split, or a smaller seq_length"
            + ("" if name == "train" else ", or eval_iters: 0")
        )


def _cache_dir(plan: _TextPlan, args: NeoXArgs) -> Path:
    return index_cache_dir(args, plan.sources[0].indexed.prefix)


def _map_builders(plan: _TextPlan, args: NeoXArgs) -> MapBuilders:
    """The functions that build the index maps of a set by the keys of these in its one cache file."""
    builders: dict[CacheKey, Callable[[], Any]] = {
        _index_key(source, args): partial(_build_maps, source, args) for source in plan.sources
    }
    return builders if len(plan.sources) == 1 else {**builders, plan.blend_key: plan.blend_key.build}


def _cached_maps(plan: _TextPlan, args: NeoXArgs) -> CachedMaps:
    return load_cached(_cache_dir(plan, args), _map_builders(plan, args))


def _index_key(source: _TextSource, args: NeoXArgs) -> IndexKey:
    return IndexKey(
        source.indexed.index_sha256,
        source.first,
        source.last,
        source.num_samples,
        args.seq_length,
        data_seed(args),
        packing_from_args(args),
        source.labels_sha256,
        source.before,
    )


def _build_maps(source: _TextSource, args: NeoXArgs) -> IndexMaps:
    """The index maps of a source. Raises DataError where no row comes of its documents."""
    maps = build_maps(
        source.indexed.sizes,
        source.first,
        source.last,
        source.num_samples,
        args.seq_length,
        data_seed(args),
        packing_from_args(args),
        source.labels,
        source.before,
    )
    if len(maps.sample_idx) < 2:
        raise DataError(
            f"{source.origin}: no sample comes of its {source.last - source.first} documents: none has a label to "
            f"train, is short enough (allow_chopped: {args.allow_chopped}), or fills a block of seq_length "
            f"{args.seq_length} (drop_last: {args.drop_last}); use other data, or change these keys"
        )
    return maps


def _log_lines(plan: _TextPlan, args: NeoXArgs, train_batch_size: int) -> list[str]:
    """Lines on what `loss_mask_token_ids` masks, and on how full the rows of each source are; of GPT-NeoX's
    rows, which mix epochs, nothing can be said."""
    packing = packing_from_args(args)
    if plan.name != "train":
        return []
    parts = [(source.indexed, source.labels, source.first, source.last) for source in plan.sources]
    lines = masked_token_lines(masked_token_ids(args), parts)
    if not packing.whole_documents or packing.compat:
        return lines
    cached_maps = _cached_maps(plan, args)
    for source in plan.sources:
        maps = cached_maps.maps(_index_key(source, args), IndexMaps)
        lines.append(
            packing_efficiency_line(
                plan.name, source.indexed, maps, packing, args.seq_length, source.labels, train_batch_size
            )
        )
    return lines


def _contents(plan: _TextPlan, args: NeoXArgs) -> SetContents:
    (source,) = plan.sources
    files = (*source.indexed.data_files, *(source.labels.data_files if source.labels is not None else ()))
    masks = [args.eod_mask_loss, *masked_token_ids(args)]
    layout = [_index_key(source, args).digest, args.reset_attention_mask, masks]
    layout_digest = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
    return SetContents(layout_digest, files, hash_cache_dir(args, source.indexed.prefix))


def _load(plan: _TextPlan, args: NeoXArgs) -> SampleSet:
    """The set of a plan, its maps from the cache."""
    cached_maps = _cached_maps(plan, args)
    members = [
        PackedDataset(
            plan.name,
            source.indexed,
            cached_maps.maps(_index_key(source, args), IndexMaps),
            args.seq_length,
            args.padded_vocab_size,
            packing=packing_from_args(args),
            labels=source.labels,
            rewards=source.rewards,
        )
        for source in plan.sources
    ]
    dataset: PackedDataset | BlendedDataset = members[0]
    if len(members) > 1:
        dataset = BlendedDataset(plan.name, members, cached_maps.maps(plan.blend_key, BlendMaps))
    return dataset if plan.epochs is None else RepeatedDataset(dataset, plan.epochs)
