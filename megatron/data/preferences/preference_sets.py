"""Builds the datasets of preference training: pairs (`dataset_impl: pairwise`) and KTO's examples.

As in `text_sets.py`, every set is planned first. Then one process writes its missing index maps into the
cache, and every process memory-maps them.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    samples_per_member,
)
from megatron.data.errors import DataError
from megatron.data.files import cached_sha256
from megatron.data.index_cache import CachedMaps, CacheKey, MapBuilders, ensure_cached, load_cached
from megatron.data.index_maps import DataState, Packing, segment_ends
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import first_labelled_token, open_labels, open_rewards
from megatron.data.open_dataset import open_dataset, open_tokens
from megatron.data.packing import packing_from_args
from megatron.data.preferences.mismatched_answers import mismatched_maps
from megatron.data.preferences.pairwise import (
    check_pairs,
    check_reference,
    check_sums,
    implicit_prompt_lengths,
    shared_prefixes,
)
from megatron.data.preferences.preference_dataset import PreferenceDataset
from megatron.data.preferences.preference_maps import COUNTS, LengthLimits, PreferenceMaps, build_preference_maps
from megatron.data.run_datasets import Datasets, SetContents
from megatron.data.set_config import (
    SET_NAMES,
    blend_weights,
    companion_paths,
    data_seed,
    hash_cache_dir,
    index_cache_dir,
    requested_samples,
)
from megatron.data.sliced_documents import DocumentSlices
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of
from megatron.neox_arguments.values.losses import least_prefix_saving, row_places, sample_kind

IndexedDatasets = tuple[IndexedDataset, ...]


@dataclass(frozen=True)
class PreferenceMapsKey(CacheKey):
    """The cache key of the index maps of one dataset (member) of a blend. Its field names are part of the
    names of cached files.

    contents: hashes of the labels, and of the tokens if there are no labels or prefixes are shared. units:
      number of pairs or examples. per_unit: responses of one unit. before: the ends of the earlier segments
      of the order, in samples (see `build_packed`). least_prefix_saving: the result of
      `losses.least_prefix_saving`.
    """

    index_sha256: tuple[str, ...]
    contents: tuple[str, ...]
    units: int
    per_unit: int
    num_samples: int
    seq_length: int
    seed: int
    packing: Packing
    limits: LengthLimits
    before: tuple[int, ...] = ()
    least_prefix_saving: float | None = None
    answers_version: int = 1


@dataclass(frozen=True)
class _PreferenceSource:
    """The opened files of one member of a preference set; a set with several members is a blend.

    sources: for pairs, the datasets of the chosen and of the rejected responses; for KTO, one dataset.
    labels, references: one dataset for each source.
    rewards: rewards of KTO's examples, or margins of pairs, one for each document of the first source.
    limit: at most this many documents of each source are used.
    """

    name: str
    sources: IndexedDatasets
    labels: IndexedDatasets | None
    references: IndexedDatasets | None = None
    rewards: IndexedDataset | None = None
    limit: int | None = None

    @property
    def documents(self) -> int:
        """The number of documents of each source that are used."""
        count = len(self.sources[0])
        return count if self.limit is None else min(count, self.limit)

    @property
    def file(self) -> Path:
        """The data file that messages about this dataset name."""
        return self.sources[0].data_file


@dataclass(frozen=True)
class _PreferencePlan:
    """The plan of one preference set: its members, the cache keys of their maps, and of their blend if
    there are several."""

    name: str
    members: tuple[_PreferenceSource, ...]
    keys: tuple[PreferenceMapsKey, ...]
    blend: CacheKey | None

    def cached_maps(self, args: NeoXArgs) -> CachedMaps:
        blends = () if self.blend is None else (self.blend,)
        return load_cached(_cache_dir(args, self.members[0]), dict.fromkeys([*self.keys, *blends]))


def build_preference_sets(
    args: NeoXArgs,
    train_batch_size: int,
    on_one_rank: Callable[[Callable[[], Any]], Any],
    epochs: int | None,
    data_state: DataState,
) -> Datasets:
    """Build the datasets of preference training. Arguments and result are as in `build_datasets`.

    Each of the `epochs` passes over the training set has its own order.
    """

    def write() -> tuple[list[_PreferencePlan], list[str]]:
        plans: list[_PreferencePlan] = []
        log_lines: list[str] = []
        for name, num_samples in zip(SET_NAMES, requested_samples(args, train_batch_size, data_state), strict=True):
            members = _members(args, name) if num_samples > 0 else []
            if not members:
                continue
            passes = epochs if name == "train" else None
            if name != "train" and not packing_from_args(args).compat:
                num_samples, passes = 1, (1 if len(members) > 1 else None)  # one pass, so that no sample counts twice
            plan = _cached_plan(args, name, members, num_samples, passes, data_state)
            plans.append(plan)
            batch, cached_maps = train_batch_size if name == "train" else None, plan.cached_maps(args)
            for member, key in zip(plan.members, plan.keys, strict=True):
                log_lines += _log_lines(member, key, cached_maps.maps(key, PreferenceMaps), batch, args.seq_length)
        return plans, log_lines

    plans, log_lines = on_one_rank(write)
    sets = {plan.name: _load(args, plan) for plan in plans}
    contents = {plan.name: _contents(args, plan) for plan in plans}
    ends = {
        plan.name: tuple((*key.before, key.num_samples) for key in plan.keys)
        for plan in plans
        if packing_from_args(args).joint
    }
    return Datasets(sets.get("train"), sets.get("valid"), sets.get("test"), tuple(log_lines), contents, ends)


def _contents(args: NeoXArgs, plan: _PreferencePlan) -> SetContents:
    parts = [key.digest for key in plan.keys] + ([] if plan.blend is None else [plan.blend.digest])
    parts += declaration_of(args).sample_keys(args)
    files = tuple(file for member in plan.members for source in member.sources for file in source.data_files)
    hash_cache = hash_cache_dir(args, plan.members[0].sources[0].prefix)
    return SetContents(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), files, hash_cache)


def preference_samples_per_epoch(args: NeoXArgs) -> int:
    """Return the number of training samples in one pass over the data. Raises DataError for unusable data."""
    return sum(_samples_per_epoch(args, _members(args, "train")))


def preference_files(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Return the data paths of preference pairs as {name: paths}.

    Names are such as `train_pos`, `valid_neg_labels` and `train_rewards`.
    """
    prefixes = {}
    for name in SET_NAMES:
        for side in ("pos", "neg"):
            data_paths, label_paths = _paths(args, name, side)
            for kind, paths in (("", data_paths), ("_labels", label_paths)):
                if paths:
                    prefixes[f"{name}_{side}{kind}"] = paths
        if margins := _margin_paths(args, name):
            prefixes[f"{name}_rewards"] = margins
    return prefixes


def _paths(args: NeoXArgs, name: str, side: str) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return (data paths, label paths) of one side of a preference set. side: "pos" (chosen) or "neg"
    (rejected)."""
    pos = (
        (args.pos_train_data_paths, args.pos_train_label_data_paths),
        (args.pos_valid_data_paths, args.pos_valid_label_data_paths),
        (args.pos_test_data_paths, args.pos_test_label_data_paths),
    )
    neg = (
        (args.neg_train_data_paths, args.neg_train_label_data_paths),
        (args.neg_valid_data_paths, args.neg_valid_label_data_paths),
        (args.neg_test_data_paths, args.neg_test_label_data_paths),
    )
    return (pos if side == "pos" else neg)[SET_NAMES.index(name)]


def _members(args: NeoXArgs, name: str) -> list[_PreferenceSource]:
    """Open and check the files of the set `name` (train, valid or test): pairs, or KTO's examples.

    Raises DataError for files that do not belong together.
    """
    return _pairs(args, name) if args.dataset_impl == "pairwise" else _examples(args, name)


def _examples(args: NeoXArgs, name: str) -> list[_PreferenceSource]:
    paths = (args.train_data_paths, args.valid_data_paths, args.test_data_paths)[SET_NAMES.index(name)] or ()
    label_paths, reward_paths = companion_paths(args, name)
    members = []
    for i, path in enumerate(paths):
        text = open_tokens(path, args.data_impl)
        if label_paths is None or reward_paths is None:
            raise DataError(
                f"{path}: KTO needs labels and rewards; set {name}_label_data_paths and {name}_reward_data_paths"
            )
        labels, rewards = open_labels(label_paths[i], text), open_rewards(reward_paths[i], text)
        members.append(_PreferenceSource(name, (text,), (labels,), None, rewards, args.limit_samples))
    return members


def _pairs(args: NeoXArgs, name: str) -> list[_PreferenceSource]:
    (pos, pos_labels), (neg, neg_labels) = (_paths(args, name, side) for side in ("pos", "neg"))
    members = []
    for i, paths in enumerate(zip(pos or (), neg or (), strict=True)):
        sides = tuple(open_tokens(path, args.data_impl) for path in paths)
        check_pairs(*sides)
        labels: IndexedDatasets | None = None
        references: IndexedDatasets | None = None
        if pos_labels is not None and neg_labels is not None:
            labels = open_labels(pos_labels[i], sides[0]), open_labels(neg_labels[i], sides[1])
        margins = _margin_paths(args, name)
        rewards = None if margins is None else open_rewards(margins[i], sides[0])
        if args.precompute_model_name is not None and sample_kind(args) == "pairs":
            references = tuple(open_dataset(f"{path}_{args.precompute_model_name}") for path in paths)
            for reference, side in zip(references, sides, strict=True):
                check_reference(reference, side)
        members.append(_PreferenceSource(name, sides, labels, references, rewards, args.limit_samples))
    return members


def _margin_paths(args: NeoXArgs, name: str) -> tuple[str, ...] | None:
    """Return the paths of the margins of a set's pairs, None if there are none.

    Only reward models (`train_impl: rm`) have margins.
    """
    return companion_paths(args, name)[1] if args.train_impl == "rm" else None


def _cached_plan(
    args: NeoXArgs,
    name: str,
    members: list[_PreferenceSource],
    num_samples: int,
    epochs: int | None,
    data_state: DataState,
) -> _PreferencePlan:
    """Write the missing index maps of a preference set into the cache, and return the set's plan.

    A resumed run keeps the segments of its order (see `build_packed`).
    """
    weights = blend_weights(args, name, [member.sources[0] for member in members])
    if epochs is None:
        shares = [num_samples] if len(members) == 1 else samples_per_member(weights, num_samples)
        blend: BlendingKey = BlendKey(weights, num_samples)
    else:
        shares = [epochs * samples for samples in _samples_per_epoch(args, members)]
        # Training sets are mixed by size, validation sets by weight, each sample once
        blend = EpochKey(tuple(shares)) if name == "train" else OnePassKey(weights, tuple(shares))
    joint = packing_from_args(args).joint and (epochs is None or name == "train")
    ends = [segment_ends(data_state.segments(name, i), n, int) if joint else (n,) for i, n in enumerate(shares)]
    keys = tuple(_maps_key(args, member, member_ends) for member, member_ends in zip(members, ends, strict=True))
    builders = _map_builders(members, keys)
    if len(members) > 1:
        builders = {**builders, blend: blend.build}
    ensure_cached(_cache_dir(args, members[0]), builders)
    return _PreferencePlan(name, tuple(members), keys, blend if len(members) > 1 else None)


def _map_builders(members: Sequence[_PreferenceSource], keys: Sequence[PreferenceMapsKey]) -> MapBuilders:
    return {key: partial(_build_maps, member, key) for member, key in zip(members, keys, strict=True)}


def _cache_dir(args: NeoXArgs, member: _PreferenceSource) -> Path:
    return index_cache_dir(args, member.sources[0].prefix)


def _maps_key(args: NeoXArgs, member: _PreferenceSource, ends: Sequence[int]) -> PreferenceMapsKey:
    """Return the cache key of the index maps of one dataset (member) of a blend.

    ends: the ends of the segments of its order, in samples; the last is the number of samples.
    """
    saving, hash_cache = least_prefix_saving(args), hash_cache_dir(args, member.sources[0].prefix)
    deciding = member.labels or member.sources
    if saving is not None and member.labels is not None:
        deciding += member.sources  # the tokens decide which prefixes are shared
    return PreferenceMapsKey(
        tuple(source.index_sha256 for source in member.sources),
        tuple(cached_sha256(file, hash_cache) for source in deciding for file in source.data_files),
        member.documents,
        2 if sample_kind(args) == "pairs" else 1,
        ends[-1],
        row_places(args) - 1,
        data_seed(args),
        packing_from_args(args),
        LengthLimits(args.max_length, args.max_prompt_length),
        tuple(ends[:-1]),
        saving,
    )


def _samples_per_epoch(args: NeoXArgs, members: Sequence[_PreferenceSource]) -> list[int]:
    """Return, for each dataset (member) of a blend, the number of samples in one pass over it."""
    if not members:
        return []
    keys, folder = [_maps_key(args, member, (1,)) for member in members], _cache_dir(args, members[0])
    builders = _map_builders(members, keys)
    ensure_cached(folder, builders)
    cached_maps = load_cached(folder, builders)
    return [int(cached_maps.maps(key, PreferenceMaps).counts[COUNTS.index("samples")]) for key in keys]


def _build_maps(member: _PreferenceSource, key: PreferenceMapsKey) -> PreferenceMaps:
    """Build the index maps of one dataset (member) of a blend. Raises DataError if its documents give no
    sample."""
    sizes = np.stack([source.sizes[: key.units].astype(np.int64) for source in member.sources], axis=1)
    if member.labels is not None:
        first_trained = np.stack([first_labelled_token(labels)[: key.units] for labels in member.labels], axis=1)
    else:
        first_trained = implicit_prompt_lengths(member.sources[0], member.sources[1], key.units)
    shape = (-1, key.per_unit)
    shares = key.least_prefix_saving is not None
    maps = build_preference_maps(
        sizes.reshape(shape), first_trained.reshape(shape), key.num_samples, key.seq_length, key.seed, key.packing,
        key.limits, key.before, partial(shared_prefixes, member.sources) if shares else None,
        key.least_prefix_saving or 0.0,
    )  # fmt: skip
    if len(maps.sample_idx) < 2:
        raise DataError(
            f"{member.file}: none of {key.units} documents makes a {member.name} sample: no answer has a trained token "
            f"within seq_length {key.seq_length} and max_length {key.limits.max_length} (allow_chopped: "
            f"{key.packing.allow_chopped}); raise these lengths, or check the labels"
        )
    return maps


def _load(args: NeoXArgs, plan: _PreferencePlan) -> PreferenceDataset | BlendedDataset:
    """Return the dataset of a preference plan; its index maps are memory-mapped from the cache."""
    cached_maps = plan.cached_maps(args)
    sets = [
        _load_member(args, member, key, cached_maps.maps(key, PreferenceMaps))
        for member, key in zip(plan.members, plan.keys, strict=True)
    ]
    if plan.blend is None:
        return sets[0]
    return BlendedDataset(sets, cached_maps.maps(plan.blend, BlendMaps))


def _load_member(
    args: NeoXArgs, member: _PreferenceSource, key: PreferenceMapsKey, maps: PreferenceMaps
) -> PreferenceDataset:
    count, sources, paired = len(maps.size), len(member.sources), sample_kind(args) == "pairs"
    numbers = np.arange(count)
    two_rows = paired and key.packing.pack_impl != "best_fit"
    in_samples = np.unique(maps.doc_idx if two_rows else maps.doc_idx // 2)
    for side, reference in enumerate(member.references or ()):
        check_sums(reference, member.sources[side], maps.size[side::2], in_samples)
    build = partial(
        PreferenceDataset, member.sources, seq_length=key.seq_length, packing=key.packing,
        labels=member.labels, vocab_size=args.padded_vocab_size,
    )  # fmt: skip
    kl_dataset = None
    if declaration_of(args).mismatched_answers(args) == "drawn":
        parts, prompts, kl_maps = mismatched_maps(
            maps, sources, member.rewards is None, key.seq_length, key.seed, key.packing, key.limits.max_length,
            key.before,
        )  # fmt: skip
        kl_dataset = build(parts, prompts, kl_maps, preference_labels=np.ones(count, np.float32))
    return build(
        [DocumentSlices(numbers % sources, numbers // sources, maps.begin + maps.shared, maps.size - maps.shared)],
        maps.prompt - maps.shared,
        maps,
        shared=maps.shared if maps.counts[COUNTS.index("shared")] else None,
        preference_labels=_preference_labels(args, member, count),
        two_rows=two_rows,
        references=member.references,
        kl_dataset=kl_dataset,
        margins=_first_rewards(member.rewards, count // 2) if paired and member.rewards is not None else None,
    )


def _first_rewards(rewards: IndexedDataset, count: int) -> np.ndarray:
    """Return the rewards of the first `count` documents, [count] float32."""
    return np.array([rewards.get(i, 0, 1)[0] for i in range(count)], np.float32)


def _preference_labels(args: NeoXArgs, member: _PreferenceSource, count: int) -> np.ndarray:
    """Return the label of each response, [count] float32: 1 for pairs; for KTO's examples 1 if desirable,
    else -1.

    Raises DataError for a reward of 0, which is neither.
    """
    if sample_kind(args) == "pairs":
        return np.ones(count, np.float32)
    if member.rewards is None:  # the chosen and rejected responses of pairs in turn
        desirable = np.arange(count) % 2 == 0
    else:
        rewards = _first_rewards(member.rewards, count)
        zero = np.flatnonzero(rewards == 0)
        if len(zero):
            raise DataError(
                f"{member.rewards.data_file}: document {zero[0]} has reward 0; write a reward above 0 (desirable) or "
                "below 0 (undesirable)"
            )
        desirable = rewards > 0
    return np.where(desirable, 1, -1).astype(np.float32)


def _log_lines(
    member: _PreferenceSource, key: PreferenceMapsKey, maps: PreferenceMaps, batch: int | None, seq_length: int
) -> list[str]:
    """Return log lines on how full the rows of a dataset are, and on its truncated and dropped documents.

    batch: samples per step; None unless it is a training set. seq_length: tokens of a row that the model
      reads.
    """
    count = dict(zip(COUNTS, maps.counts.tolist(), strict=True))
    units, samples = count["units"], count["samples"]
    unit = "pairs" if key.per_unit == 2 else "examples"
    rows = 2 if key.per_unit == 2 and key.packing.pack_impl != "best_fit" else 1
    padding = 100 * (1 - (count["tokens"] - count["shared"]) / (samples * rows * (key.seq_length + 1)))
    line = f"{member.name}: {member.file}: {units} {unit} in {samples * rows} rows of {seq_length} tokens"
    if batch is not None:
        line += f", {units / samples * batch:.1f} {unit} a step on average"
    lines = [f"{line}; {padding:.1f} % padding"]
    if key.least_prefix_saving is not None:
        share = 100 * count["shareable"] / max(1, count["tokens"])
        outcome = (
            "are laid out once" if count["shared"] else "are stored twice, because sharing them would save too little"
        )
        lines.append(
            f"{member.name}: prefix_sharing: {count['shareable']} tokens that chosen and rejected begin with "
            f"({share:.1f} %) {outcome}"
        )
    for kind, reason in (
        ("untrained", "an answer has no token to train"),
        ("unreached", "all trained tokens of an answer are cut off"),
    ):
        if count[kind]:
            lines.append(
                f"{member.file}: {count[kind]} {unit} are left out: {reason} "
                f"(the first: number {count[f'first_{kind}']})"
            )
    if count["too_long"]:
        lines.append(f"{member.file}: {count['too_long']} {unit} are left out: too long (allow_chopped: false)")
    for kind, key_of in (("prompt", "max_prompt_length"), ("answer", "max_length, seq_length or truncate_documents")):
        if count[f"cut_{kind}s"]:
            end = "beginning" if kind == "prompt" else "end"
            lines.append(
                f"{member.file}: {count[f'cut_{kind}s']} {kind}s lose their {end}, {count[f'cut_{kind}_tokens']} "
                f"tokens in all ({key_of})"
            )
    return lines
