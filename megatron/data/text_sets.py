"""Builds the datasets of language-model training: documents of data files, packed into rows and blended by
weight.

First every set is planned (which documents, how many samples of each file). Then one process builds missing
index maps into the cache, and every process memory-maps them.
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
from megatron.data.index_maps import DataState, IndexKey, IndexMaps, Packing, full_windows, segment_ends
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import open_labels, open_rewards
from megatron.data.log_lines import masked_token_lines, packing_efficiency_line
from megatron.data.open_dataset import open_tokens
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import build_maps, packing_from_args
from megatron.data.run_datasets import Datasets, SampleSet, SetContents
from megatron.data.set_config import (
    SET_NAMES,
    SET_PREFIX,
    blend_weights,
    companion_paths,
    data_prefixes,
    data_seed,
    hash_cache_dir,
    index_cache_dir,
    masked_token_ids,
    requested_samples,
    split_boundaries,
    storage,
    valid_sets,
)
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of, further_sets
from megatron.neox_arguments.values.data_split import cuts_listed_paths

THREADS = 8  # files hashed at once, because hashing thousands of files often waits for the disk


@dataclass(frozen=True)
class _TextSource:
    """The sequences [start, stop) of one dataset file, and how many samples to take of them.

    origin: its name in messages.
    labels_sha256: set if labels decide which documents are used.
    earlier_ends: the ends of the earlier segments of the order, in samples (see `build_packed`).
    """

    indexed: IndexedDataset
    start: int
    stop: int
    num_samples: int
    origin: str
    labels: IndexedDataset | None = None
    rewards: IndexedDataset | None = None
    labels_sha256: str | None = None
    earlier_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class _TextPlan:
    """The plan of one set: its sources, blended by weight if there are several, and the total number of
    samples.

    epochs: passes over all samples of the sources; None: num_samples samples are drawn by weight.
    phases: weights that change during the run.
    single_pass: take each sample of the sources once, in proportion to the weights.
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
        """The cache key of the maps that blend the sources."""
        samples = tuple(source.num_samples for source in self.sources)
        if self.phases:
            return PhasesKey(self.phases)
        if self.single_pass:
            return OnePassKey(self.weights, samples)
        return BlendKey(self.weights, self.num_samples) if self.epochs is None else EpochKey(samples)


def build_text_sets(
    args: NeoXArgs,
    train_batch_size: int,
    on_one_rank: Callable[[Callable[[], Any]], Any],
    epochs: int | None,
    data_state: DataState,
) -> Datasets:
    """Build the datasets of plain or labelled text. Arguments and result are as in `build_datasets`."""

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

    plans, log_lines = on_one_rank(write)
    sets = {plan.name: _load(plan, args) for plan in plans}
    valid = {name: sets.pop(SET_PREFIX + name) for name in valid_sets(args) if SET_PREFIX + name in sets}
    ends = {
        plan.name: tuple((*source.earlier_ends, source.num_samples) for source in plan.sources)
        for plan in plans
        if packing_from_args(args).joint and plan.epochs is None
    }
    scored = {name for name, declared in further_sets().items() if declared.is_scored}
    contents = {plan.name: _contents(plan, args) for plan in plans if plan.name in scored}
    return Datasets(None, None, None, tuple(log_lines), contents, ends, valid_sets=valid).with_sets(sets)


def text_samples_per_epoch(args: NeoXArgs) -> int:
    """Return the number of training samples in one pass over the data. Raises DataError for unusable data."""
    plans = _plans(args, (1, 0, 0), DataState(), args.train_epochs)
    return next(plan.num_samples for plan in plans if plan.name == "train")


def _plans(
    args: NeoXArgs, sample_counts: tuple[int, int, int], data_state: DataState, epochs: int | None = None
) -> list[_TextPlan]:
    """Return the plans of all sets that have documents and of which samples are needed.

    sample_counts: samples needed of train, valid and test.
    """
    prefixes = data_prefixes(args)
    plans = (
        _split_plans(args, prefixes["all"][0], sample_counts)
        if "all" in prefixes
        else _listed_plans(args, sample_counts)
    )
    plans = [_one_pass(plan, args) for plan in (*plans, *_valid_set_plans(args, sample_counts[1]))]
    if sample_counts[0] > 0:
        plans += _further_plans(args, data_state)
    plans = [plan for plan in plans if plan.num_samples > 0 and plan.sources[0].stop > plan.sources[0].start]
    if sample_counts[0] > 0 and not any(plan.name == "train" for plan in plans):
        raise DataError(
            f"no document is left for training (data {prefixes}, split {args.split}); use more data or another split"
        )
    for plan in plans:
        for source in plan.sources:
            _check_length(plan.name, source, args)
    return [
        _as_full_epochs(plan, args, epochs)
        if epochs is not None and plan.name == "train"
        else _with_segments(plan, args, data_state)
        for plan in plans
    ]


def _split_plans(args: NeoXArgs, prefix: str, sample_counts: tuple[int, int, int]) -> list[_TextPlan]:
    """Return the plans of train, valid and test, into which `split` divides the documents of `data_path`."""
    indexed = open_tokens(prefix, args.data_impl)
    boundaries = split_boundaries(args.split, len(indexed))
    plans = []
    for name, start, end, samples in zip(SET_NAMES, boundaries, boundaries[1:], sample_counts, strict=False):
        origin = f'{name} part of split "{args.split}" of {indexed.data_file}'
        source = _TextSource(indexed, start, _limited(args, start, end), samples, origin)
        plans.append(_TextPlan(name, (source,), (1.0,), samples))
    return plans


def _listed_plans(args: NeoXArgs, sample_counts: tuple[int, int, int]) -> list[_TextPlan]:
    """Return the plans of the sets in `train_data_paths`, `valid_data_paths` and `test_data_paths`.

    If `split` divides the listed paths, each set takes its part of every path in `train_data_paths`.
    """
    prefixes, plans, is_split = data_prefixes(args), [], cuts_listed_paths(args)
    for part, (name, samples) in enumerate(zip(SET_NAMES, sample_counts, strict=True)):
        list_name = "train" if is_split else name
        if list_name not in prefixes:
            continue
        members = [open_tokens(prefix, args.data_impl) for prefix in prefixes[list_name]]
        for indexed in members:
            if len(members) > 1 and not len(indexed):
                raise DataError(f"{indexed.data_file}: no document; take it out of {list_name}_data_paths")
        ranges = [
            split_boundaries(args.split, len(dataset))[part:][:2] if is_split else (0, len(dataset))
            for dataset in members
        ]
        if len(members) > 1 and all(start == stop for start, stop in ranges):
            continue
        for indexed, (start, stop) in zip(members, ranges, strict=True):
            if len(members) > 1 and start == stop:
                problem = f"split {args.split} leaves none of its {len(indexed)} documents to {name}"
                raise DataError(f"{indexed.data_file}: {problem}; use another split, or valid_data_paths")
        weights = blend_weights(args, list_name, members)
        shares = samples_per_member(weights, samples)
        phases: Phases = ()
        schedule = args.train_data_weight_schedule
        if name == "train" and schedule is not None:
            phases = weight_phases(schedule["until"], schedule["weights"], samples // args.train_iters, samples)
            shares = [sum(counts) for counts in zip(*(samples_per_member(w, n) for n, w in phases), strict=True)]
        sources = []
        for i, (indexed, share, (start, stop)) in enumerate(zip(members, shares, ranges, strict=True)):
            cited = f'{name} part of split "{args.split}" of ' if is_split else ""
            origin = f"{cited}{indexed.data_file} ({list_name}_data_paths)"
            source = _TextSource(indexed, start, _limited(args, start, stop), share, origin)
            sources.append(_with_companions(source, args, list_name, i))
        plans.append(_TextPlan(name, tuple(sources), weights, samples, phases=phases))
    return plans


def _valid_set_plans(args: NeoXArgs, samples: int) -> list[_TextPlan]:
    """Return the plans of the named validation sets (`valid_sets`), each with so many samples."""
    plans = []
    for name, prefixes in valid_sets(args).items():
        members = [open_tokens(prefix, args.data_impl) for prefix in prefixes]
        for indexed in members:
            if not len(indexed):
                raise DataError(f"{indexed.data_file}: no document; take it out of valid_sets.{name}")
        weights = blend_weights(args, SET_PREFIX + name, members)
        sources = []
        for i, (indexed, share) in enumerate(zip(members, samples_per_member(weights, samples), strict=True)):
            origin = f"{indexed.data_file} (valid_sets.{name})"
            source = _TextSource(indexed, 0, _limited(args, 0, len(indexed)), share, origin)
            sources.append(_with_companions(source, args, SET_PREFIX + name, i))
        plans.append(_TextPlan(SET_PREFIX + name, tuple(sources), weights, samples))
    return plans


def _further_plans(args: NeoXArgs, data_state: DataState) -> list[_TextPlan]:
    """Return the plans of the extra training sets that the training method declares (`further_sets`).

    Each has all its documents, repeated as often as the steps that read it need.
    """
    plans = []
    for name, declared in further_sets().items():
        if (path := declared.path(args)) is not None:
            steps = declaration_of(args).num_further_steps(args, data_state.iteration, args.train_iters)
            samples = data_state.further_samples + steps * args.train_batch_size
            indexed = open_tokens(path, storage(args, name))
            if not len(indexed):
                raise DataError(f"{indexed.data_file}: no document; set {declared.data} to data that has some")
            source = _TextSource(indexed, 0, len(indexed), samples, f"{indexed.data_file} ({declared.data})")
            plans.append(_TextPlan(name, (_with_companions(source, args, name, 0),), (1.0,), samples))
    return plans


def _with_segments(plan: _TextPlan, args: NeoXArgs, data_state: DataState) -> _TextPlan:
    """Return the plan with each source's order of samples continued from the resumed run.

    The order keeps its earlier segments (see `build_packed`). If they hold too few samples, one more segment
    is added.
    """
    packing = packing_from_args(args)
    if not packing.joint or plan.single_pass:
        return plan

    def extended(source: _TextSource, earlier_ends: tuple[int, ...]) -> _TextSource:
        round_up: Callable[[int], int] = int
        if packing.windows:
            round_up = partial(full_windows, _tokens(source, args), args.seq_length)
        ends = segment_ends(earlier_ends, source.num_samples, round_up)
        return replace(source, num_samples=ends[-1], earlier_ends=ends[:-1])

    sources = (extended(source, data_state.segments(plan.name, i)) for i, source in enumerate(plan.sources))
    return replace(plan, sources=tuple(sources))


def _one_pass(plan: _TextPlan, args: NeoXArgs) -> _TextPlan:
    """Turn the plan of a validation or test set into a single pass over its sources, so that no sample counts
    twice.

    Sets in GPT-NeoX's packing (windows, `compat_pack_impl`) keep the number of samples that GPT-NeoX takes.
    """
    packing = packing_from_args(args)
    if plan.name == "train" or not plan.num_samples or packing.windows or packing.compat:
        return plan
    if len(plan.sources) == 1:
        return replace(plan, sources=(replace(plan.sources[0], num_samples=1),), num_samples=1)
    sources = tuple(replace(source, num_samples=_rows(source, args)) for source in plan.sources)
    samples = sum(source.num_samples for source in sources)
    return replace(plan, sources=sources, num_samples=samples, single_pass=True)


def _limited(args: NeoXArgs, start: int, stop: int) -> int:
    """Return `stop`, lowered if necessary so that [start, stop) holds at most `limit_samples` sequences."""
    return stop if args.limit_samples is None else min(stop, start + args.limit_samples)


def _with_companions(source: _TextSource, args: NeoXArgs, name: str, member: int) -> _TextSource:
    """Return the source with the labels and rewards that the configuration lists for it, opened."""
    label_paths, reward_paths = companion_paths(args, name)
    if label_paths is not None:
        labels = open_labels(label_paths[member], source.indexed)
        source = replace(source, labels=labels)
        if packing_from_args(args).unsplit_documents:  # every label may change which rows there are
            content = cached_sha256(labels.data_file, hash_cache_dir(args, source.indexed.prefix))
            source = replace(source, labels_sha256=content)
    if reward_paths is not None:
        source = replace(source, rewards=open_rewards(reward_paths[member], source.indexed))
    return source


def _as_full_epochs(plan: _TextPlan, args: NeoXArgs, epochs: int) -> _TextPlan:
    """Return the plan of `epochs` passes over a set. Its number of samples is that of one pass."""
    windows = packing_from_args(args).windows
    sources = [
        replace(source, num_samples=(_tokens(source, args) - 1) // args.seq_length if windows else _rows(source, args))
        for source in plan.sources
    ]
    return _TextPlan(plan.name, tuple(sources), (), sum(source.num_samples for source in sources), epochs)


def _rows(source: _TextSource, args: NeoXArgs) -> int:
    """Return the number of samples in one epoch of a source."""
    return len(_build_maps(replace(source, num_samples=1), args).shuffle_idx)


def _tokens(source: _TextSource, args: NeoXArgs) -> int:
    """Return the number of tokens in one epoch of a source."""
    sizes = source.indexed.sizes[source.start : source.stop]
    return int(packing_from_args(args).lengths(sizes).sum(dtype=np.int64))


def _check_length(name: str, source: _TextSource, args: NeoXArgs) -> None:
    """Raise DataError if a source has too few tokens for one window."""
    tokens, seq_length = _tokens(source, args), args.seq_length
    if tokens < seq_length + 1 and packing_from_args(args).windows:
        raise DataError(
            f"{source.origin}: {tokens} tokens in {source.stop - source.start} documents, but one sample takes "
            f"seq_length + 1 = {seq_length + 1}; use more data, another split, or a smaller seq_length"
            + ("" if name == "train" else ", or eval_iters: 0")
        )


def _cache_dir(plan: _TextPlan, args: NeoXArgs) -> Path:
    return index_cache_dir(args, plan.sources[0].indexed.prefix)


def _map_builders(plan: _TextPlan, args: NeoXArgs) -> MapBuilders:
    """Return {cache key: function that builds the maps} for the one cache file of a set.

    It holds the index maps of each source and, if there are several sources, the maps that blend them.
    """
    builders: dict[CacheKey, Callable[[], Any]] = {
        _index_key(source, args): partial(_build_maps, source, args) for source in plan.sources
    }
    return builders if len(plan.sources) == 1 else {**builders, plan.blend_key: plan.blend_key.build}


def _cached_maps(plan: _TextPlan, args: NeoXArgs) -> CachedMaps:
    return load_cached(_cache_dir(plan, args), _map_builders(plan, args))


def _order(source: _TextSource, args: NeoXArgs) -> tuple[int, int, int, int, int, Packing]:
    """Return the arguments that `IndexKey` and `build_maps` share; they decide the order of the samples."""
    return source.start, source.stop, source.num_samples, args.seq_length, data_seed(args), packing_from_args(args)


def _index_key(source: _TextSource, args: NeoXArgs) -> IndexKey:
    return IndexKey(source.indexed.index_sha256, *_order(source, args), source.labels_sha256, source.earlier_ends)


def _build_maps(source: _TextSource, args: NeoXArgs) -> IndexMaps:
    """Build the index maps of a source. Raises DataError if its documents give no row."""
    maps = build_maps(source.indexed.sizes, *_order(source, args), source.labels, source.earlier_ends)
    if len(maps.sample_idx) < 2:
        raise DataError(
            f"{source.origin}: no sample can be made of its {source.stop - source.start} documents: none has a label "
            f"to train, is short enough (allow_chopped: {args.allow_chopped}), or fills a block of seq_length "
            f"{args.seq_length} (drop_last: {args.drop_last}); use other data, or change these keys"
        )
    return maps


def _log_lines(plan: _TextPlan, args: NeoXArgs, train_batch_size: int) -> list[str]:
    """Return log lines on the tokens that `loss_mask_token_ids` masks, and on how full the rows of each
    source are.

    GPT-NeoX's rows, which mix epochs, are not measured.
    """
    if plan.name != "train":
        return []
    packing = packing_from_args(args)
    parts = [(source.indexed, source.labels, source.start, source.stop) for source in plan.sources]
    lines = masked_token_lines(masked_token_ids(args), parts)
    if not packing.unsplit_documents or packing.compat:
        return lines
    cached_maps = _cached_maps(plan, args)
    for source in plan.sources:
        maps, seq_length = cached_maps.maps(_index_key(source, args), IndexMaps), args.seq_length
        lines.append(
            packing_efficiency_line(source.indexed, maps, packing, seq_length, source.labels, train_batch_size)
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
    """Return the dataset of a plan; its index maps are memory-mapped from the cache."""
    cached_maps = _cached_maps(plan, args)
    members = [
        PackedDataset(
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
        dataset = BlendedDataset(members, cached_maps.maps(plan.blend_key, BlendMaps))
    return dataset if plan.epochs is None else RepeatedDataset(dataset, plan.epochs)
