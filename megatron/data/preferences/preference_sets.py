"""The sets of preference training: pairs (`dataset_impl: pairwise`) and KTO's examples.

As for text, every set is planned, its maps are made or found in the cache by one process, then every process
maps them.
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
from megatron.data.open_dataset import open_dataset
from megatron.data.packing import packing_from_args
from megatron.data.preferences.kto import mismatched_maps
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
from megatron.data.sampler import data_seed
from megatron.data.set_config import (
    SET_NAMES,
    blend_weights,
    companion_paths,
    hash_cache_dir,
    index_cache_dir,
    requested_samples,
)
from megatron.data.sliced_documents import DocumentSlices
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import (
    least_prefix_saving,
    needs_step_baselines,
    row_places,
    sample_kind,
)

IndexedDatasets = tuple[IndexedDataset, ...]


@dataclass(frozen=True)
class PreferenceMapsKey(CacheKey):
    """All that decides the maps of one member. The names of its fields are part of the names of cached files.

    contents: hashes of the labels, and of the tokens where there are no labels or prefixes are shared. units:
    pairs or examples. per_unit: responses of one unit. before: where the earlier segments of the order end,
    in samples (see `build_packed`). least_prefix_saving: as of `losses.least_prefix_saving`.
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
    """One member of a set. sources: of pairs, the chosen and the rejected responses; of KTO, the only pair of
    files.

    labels and references: beside each of the sources; rewards: of KTO's examples, or the margins of pairs,
    beside the first. limit: documents of each that are used at most.
    """

    name: str
    sources: IndexedDatasets
    labels: IndexedDatasets | None
    references: IndexedDatasets | None = None
    rewards: IndexedDataset | None = None
    limit: int | None = None

    @property
    def documents(self) -> int:
        """Documents that are used of each source."""
        count = len(self.sources[0])
        return count if self.limit is None else min(count, self.limit)

    @property
    def file(self) -> Path:
        """The file that messages name."""
        return self.sources[0].data_file


@dataclass(frozen=True)
class _PreferencePlan:
    """One set: its members, the keys of their maps, and the key of their blend when there are several."""

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
    once: Callable[[Callable[[], Any]], Any],
    epochs: int | None,
    data_state: DataState,
) -> Datasets:
    """`build_datasets` for preference training. epochs: passes over the training set, each in an order of its
    own."""

    def write() -> tuple[list[_PreferencePlan], list[str]]:
        plans: list[_PreferencePlan] = []
        log_lines: list[str] = []
        for name, wanted in zip(SET_NAMES, requested_samples(args, train_batch_size, data_state), strict=True):
            members = _members(args, name) if wanted > 0 else []
            if not members:
                continue
            passes = epochs if name == "train" else None
            if name != "train" and not packing_from_args(args).compat:
                wanted, passes = 1, (1 if len(members) > 1 else None)  # one pass: no sample counts twice
            plan = _cached_plan(args, name, members, wanted, passes, data_state)
            plans.append(plan)
            batch, cached_maps = train_batch_size if name == "train" else None, plan.cached_maps(args)
            for member, key in zip(plan.members, plan.keys, strict=True):
                log_lines += _log_lines(member, key, cached_maps.maps(key, PreferenceMaps), batch, args.seq_length)
        return plans, log_lines

    plans, log_lines = once(write)
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
    if sample_kind(args) == "answers":
        parts += [args.kto_loss_type, args.kto_kl, str(args.compat_kto)]
    files = tuple(file for member in plan.members for source in member.sources for file in source.data_files)
    hash_cache = hash_cache_dir(args, plan.members[0].sources[0].prefix)
    return SetContents(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), files, hash_cache)


def preference_samples_per_epoch(args: NeoXArgs) -> int:
    """Training samples of one pass over the data. Raises DataError for data that cannot be used."""
    return sum(_samples_per_epoch(args, _members(args, "train")))


def preference_files(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Name such as `train_pos`, `valid_neg_labels` or `train_rewards` -> prefixes of these files, of
    pairs."""
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
    """The data paths and label paths of one side, "pos" (chosen) or "neg" (rejected), of a set."""
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
    """The files of a set, opened and checked. Raises DataError for files that do not belong together."""
    return _pairs(args, name) if args.dataset_impl == "pairwise" else _examples(args, name)


def _examples(args: NeoXArgs, name: str) -> list[_PreferenceSource]:
    paths = (args.train_data_paths, args.valid_data_paths, args.test_data_paths)[SET_NAMES.index(name)] or ()
    label_paths, reward_paths = companion_paths(args, name)
    members = []
    for i, path in enumerate(paths):
        text = open_dataset(path, args.data_impl)
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
        sides = tuple(open_dataset(path, args.data_impl) for path in paths)
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
    """The paths of the margins of the pairs of a set, which only reward models read."""
    return companion_paths(args, name)[1] if args.train_impl == "rm" else None


def _cached_plan(
    args: NeoXArgs,
    name: str,
    members: list[_PreferenceSource],
    wanted: int,
    epochs: int | None,
    data_state: DataState,
) -> _PreferencePlan:
    """A plan whose maps lie in the cache, in the segments that its run was begun with."""
    weights = blend_weights(args, name, [member.sources[0] for member in members])
    if epochs is None:
        shares = [wanted] if len(members) == 1 else samples_per_member(weights, wanted)
        blend: BlendingKey = BlendKey(weights, wanted)
    else:
        shares = [epochs * samples for samples in _samples_per_epoch(args, members)]
        # To train by size; to validate by weight, each sample once
        blend = EpochKey(tuple(shares)) if name == "train" else OnePassKey(weights, tuple(shares))
    joint = packing_from_args(args).joint and (epochs is None or name == "train")
    ends = [segment_ends(data_state.segments(name, i), n, int) if joint else (n,) for i, n in enumerate(shares)]
    keys = tuple(_maps_key(args, member, each) for member, each in zip(members, ends, strict=True))
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
    """ends: where the segments of the order end, in samples; the last is how many are wanted."""
    saving, hash_cache = least_prefix_saving(args), hash_cache_dir(args, member.sources[0].prefix)
    deciding = member.labels or member.sources
    if saving is not None and member.labels is not None:
        deciding += member.sources  # what they begin with
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
    """Samples of one pass over each member."""
    if not members:
        return []
    keys, folder = [_maps_key(args, member, (1,)) for member in members], _cache_dir(args, members[0])
    builders = _map_builders(members, keys)
    ensure_cached(folder, builders)
    cached_maps = load_cached(folder, builders)
    return [int(cached_maps.maps(key, PreferenceMaps).counts[COUNTS.index("samples")]) for key in keys]


def _build_maps(member: _PreferenceSource, key: PreferenceMapsKey) -> PreferenceMaps:
    """The maps of a member. Raises DataError where no sample comes of its documents."""
    sizes = np.stack([source.sizes[: key.units].astype(np.int64) for source in member.sources], axis=1)
    if member.labels is not None:
        first = np.stack([first_labelled_token(labels)[: key.units] for labels in member.labels], axis=1)
    else:
        first = implicit_prompt_lengths(member.sources[0], member.sources[1], key.units)
    shape = (-1, key.per_unit)
    shares = key.least_prefix_saving is not None
    maps = build_preference_maps(
        sizes.reshape(shape), first.reshape(shape), key.num_samples, key.seq_length, key.seed, key.packing, key.limits,
        key.before, partial(shared_prefixes, member.sources) if shares else None, key.least_prefix_saving or 0.0,
    )  # fmt: skip
    if len(maps.sample_idx) < 2:
        raise DataError(
            f"{member.file}: none of {key.units} documents makes a {member.name} sample: no answer is trained within "
            f"seq_length {key.seq_length}, max_length {key.limits.max_length} and allow_chopped "
            f"{key.packing.allow_chopped}; change these keys"
        )
    return maps


def _load(args: NeoXArgs, plan: _PreferencePlan) -> PreferenceDataset | BlendedDataset:
    """The set of a plan, its maps from the cache."""
    cached_maps = plan.cached_maps(args)
    sets = [
        _load_member(args, member, key, cached_maps.maps(key, PreferenceMaps))
        for member, key in zip(plan.members, plan.keys, strict=True)
    ]
    if plan.blend is None:
        return sets[0]
    return BlendedDataset(plan.name, sets, cached_maps.maps(plan.blend, BlendMaps))


def _load_member(
    args: NeoXArgs, member: _PreferenceSource, key: PreferenceMapsKey, maps: PreferenceMaps
) -> PreferenceDataset:
    count, sources, paired = len(maps.size), len(member.sources), sample_kind(args) == "pairs"
    numbers = np.arange(count)
    two_rows = paired and key.packing.pack_impl != "best_fit"
    kept = np.unique(maps.doc_idx if two_rows else maps.doc_idx // 2)
    for side, reference in enumerate(member.references or ()):
        check_sums(reference, member.sources[side], maps.size[side::2], kept)
    build = partial(
        PreferenceDataset, member.name, member.sources, seq_length=key.seq_length, packing=key.packing,
        labels=member.labels, vocab_size=args.padded_vocab_size,
    )  # fmt: skip
    kl_dataset = None
    if not paired and needs_step_baselines(args) and args.kto_kl == "drawn":
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
    """The rewards of the first `count` documents, float32."""
    return np.array([rewards.get(i, 0, 1)[0] for i in range(count)], np.float32)


def _preference_labels(args: NeoXArgs, member: _PreferenceSource, count: int) -> np.ndarray:
    """The label of each response, [count] float32: of pairs 1; of KTO's examples 1 if desirable, else -1.

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
            raise DataError(f"{member.rewards.data_file}: document {zero[0]} has reward 0: KTO reads above or below 0")
        desirable = rewards > 0
    return np.where(desirable, 1, -1).astype(np.float32)


def _log_lines(
    member: _PreferenceSource, key: PreferenceMapsKey, maps: PreferenceMaps, batch: int | None, seq_length: int
) -> list[str]:
    """Lines on how full the rows are, and on what is cut or left out. batch: samples of a step, for
    training; seq_length: tokens of a row that the model reads."""
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
        what = "are laid out once" if count["shared"] else "stand twice: sharing them does not pay"
        lines.append(
            f"{member.name}: prefix_sharing: {count['shareable']} tokens that chosen and rejected begin with "
            f"({share:.1f} %) {what}"
        )
    for what, why in (("untrained", "an answer has no token to train"), ("unreached", "all to train is cut off")):
        if count[what]:
            lines.append(
                f"{member.file}: {count[what]} {unit} are left out: {why} (the first: number {count[f'first_{what}']})"
            )
    if count["too_long"]:
        lines.append(f"{member.file}: {count['too_long']} {unit} are left out: too long (allow_chopped: false)")
    for what, key_of in (("prompt", "max_prompt_length"), ("answer", "max_length, seq_length or truncate_documents")):
        if count[f"cut_{what}s"]:
            end = "beginning" if what == "prompt" else "end"
            lines.append(
                f"{member.file}: {count[f'cut_{what}s']} {what}s lose their {end}, {count[f'cut_{what}_tokens']} "
                f"tokens in all ({key_of})"
            )
    return lines
