"""From config keys to the sets of preference training: pairs (`dataset_impl: pairwise`) and KTO's examples."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.blending import BlendedDataset, BlendingKey, BlendKey, BlendMaps, EpochKey, OnceKey, wanted_samples
from megatron.data.datasets import (
    NAMES,
    Datasets,
    MadeOf,
    beside,
    blend_weights,
    file_notes,
    index_cache_dir,
    requested_samples,
)
from megatron.data.errors import DataError
from megatron.data.files import known_sha256
from megatron.data.index_cache import CacheKey, Entry, Makers, cached, load
from megatron.data.index_maps import Begun, Packing, stretches
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import first_labelled, open_labels, open_rewards
from megatron.data.packing import packing_of
from megatron.data.preferences.kto import mismatched
from megatron.data.preferences.pairwise import check_pairs, check_reference, check_sums, first_of_answers
from megatron.data.preferences.preference_dataset import COUNTS, AnswerDataset, AnswerMaps, Limits, lay_out
from megatron.data.sampler import data_seed
from megatron.data.slices import Slices
from megatron.data.storage import open_dataset
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.losses import couples, sample_kind

Both = tuple[IndexedDataset, ...]


@dataclass(frozen=True)
class AnswerKey(CacheKey):
    """All that decides the maps of one set. contents: of the labels, or without them of the tokens; before: as
    `build_packed`."""

    index_sha256: tuple[str, ...]
    contents: tuple[str, ...]
    units: int
    per_unit: int
    num_samples: int
    seq_length: int
    seed: int
    packing: Packing
    limits: Limits
    before: tuple[int, ...] = ()
    answers_version: int = 1


@dataclass(frozen=True)
class _Member:
    """One of the sets of train, valid or test. sources: of pairs, the chosen and the rejected answers."""

    name: str
    sources: Both
    labels: Both | None
    references: Both | None = None
    rewards: IndexedDataset | None = None
    limit: int | None = None

    @property
    def documents(self) -> int:
        """Of each source."""
        count = len(self.sources[0])
        return count if self.limit is None else min(count, self.limit)

    @property
    def file(self) -> Path:
        return self.sources[0].data_file


@dataclass(frozen=True)
class _Plan:
    """One set: its members, the keys of their maps, and of the blend when there are several."""

    name: str
    members: tuple[_Member, ...]
    keys: tuple[AnswerKey, ...]
    blend: CacheKey | None

    def entry(self, args: NeoXArgs) -> Entry:
        blends = () if self.blend is None else (self.blend,)
        return load(_cache(args, self.members[0]), dict.fromkeys([*self.keys, *blends]))


def build_answer_sets(
    args: NeoXArgs,
    *,
    train_batch_size: int,
    once: Callable[[Callable[[], Any]], Any],
    epochs: int | None,
    begun: Begun,
) -> Datasets:
    """As `build_datasets`; epochs: so many passes over the training set, each in an order of its own."""

    def write() -> tuple[list[_Plan], list[str]]:
        plans: list[_Plan] = []
        notes: list[str] = []
        for name, wanted in zip(NAMES, requested_samples(args, train_batch_size, begun), strict=True):
            members = _members(args, name) if wanted > 0 else []
            if not members:
                continue
            passes = epochs if name == "train" else None
            if name != "train" and not packing_of(args).compat:
                wanted, passes = 1, (1 if len(members) > 1 else None)  # one pass: no sample counts twice
            plan = _written(args, name, members, wanted, passes, begun)
            plans.append(plan)
            batch, entry = train_batch_size if name == "train" else None, plan.entry(args)
            for member, key in zip(plan.members, plan.keys, strict=True):
                notes += _note(member, key, entry.maps(key, AnswerMaps), batch)
        return plans, notes

    plans, notes = once(write)
    sets = {plan.name: _load(args, plan) for plan in plans}
    made_of = {plan.name: _made_of(args, plan) for plan in plans}
    ends = {
        plan.name: tuple((*key.before, key.num_samples) for key in plan.keys)
        for plan in plans
        if packing_of(args).joint
    }
    return Datasets(sets.get("train"), sets.get("valid"), sets.get("test"), tuple(notes), made_of, ends)


def _made_of(args: NeoXArgs, plan: _Plan) -> MadeOf:
    parts = [key.digest for key in plan.keys] + ([] if plan.blend is None else [plan.blend.digest])
    if sample_kind(args) == "answers":
        parts += [args.kto_loss_type, args.kto_kl, str(args.compat_kto)]
    files = tuple(file for member in plan.members for source in member.sources for file in source.data_files)
    notes = file_notes(args, plan.members[0].sources[0].prefix)
    return MadeOf(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), files, notes)


def answer_samples(args: NeoXArgs) -> int:
    """Training samples of one pass over the data."""
    return sum(_samples(args, _members(args, "train")))


def answer_files(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Set name -> prefixes of all its files of pairs, in pairs; labels and references included."""
    found = {}
    for name in NAMES:
        for side in ("pos", "neg"):
            for kind, paths in (("", _paths(args, name, side)[0]), ("_labels", _paths(args, name, side)[1])):
                if paths:
                    found[f"{name}_{side}{kind}"] = paths
    return found


def _paths(args: NeoXArgs, name: str, side: str) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """The data and label paths of one side of a set."""
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
    return (pos if side == "pos" else neg)[NAMES.index(name)]


def _members(args: NeoXArgs, name: str) -> list[_Member]:
    if args.dataset_impl == "pairwise":
        return _pairs(args, name)
    paths = (args.train_data_paths, args.valid_data_paths, args.test_data_paths)[NAMES.index(name)] or ()
    labels, rewards = beside(args, name)
    found = []
    for i, path in enumerate(paths):
        text = open_dataset(path, args.data_impl)
        if labels is None or rewards is None:
            raise DataError(
                f"{path}: KTO needs labels and rewards; set {name}_label_data_paths and {name}_reward_data_paths"
            )
        given = open_labels(labels[i], text)
        found.append(_Member(name, (text,), (given,), None, open_rewards(rewards[i], text), args.limit_samples))
    return found


def _pairs(args: NeoXArgs, name: str) -> list[_Member]:
    (pos, pos_labels), (neg, neg_labels) = (_paths(args, name, side) for side in ("pos", "neg"))
    found = []
    for i, paths in enumerate(zip(pos or (), neg or (), strict=True)):
        sides = tuple(open_dataset(path, args.data_impl) for path in paths)
        check_pairs(*sides)
        labels: Both | None = None
        references: Both | None = None
        if pos_labels is not None and neg_labels is not None:
            labels = open_labels(pos_labels[i], sides[0]), open_labels(neg_labels[i], sides[1])
        if args.precompute_model_name is not None and sample_kind(args) == "pairs":
            references = tuple(open_dataset(f"{path}_{args.precompute_model_name}") for path in paths)
            for reference, side in zip(references, sides, strict=True):
                check_reference(reference, side)
        found.append(_Member(name, sides, labels, references, None, args.limit_samples))
    return found


def _written(args: NeoXArgs, name: str, members: list[_Member], wanted: int, epochs: int | None, begun: Begun) -> _Plan:
    """A plan whose maps lie in the cache, in the stretches that its run was begun with."""
    weights = blend_weights(args, name, [member.sources[0] for member in members])
    if epochs is None:
        shares = [wanted] if len(members) == 1 else wanted_samples(weights, wanted)
        key: BlendingKey = BlendKey(weights, wanted)
    else:
        shares = [epochs * samples for samples in _samples(args, members)]
        # To train by size; to validate by weight, each sample once
        key = EpochKey(tuple(shares)) if name == "train" else OnceKey(weights, tuple(shares))
    joint = packing_of(args).joint and (epochs is None or name == "train")
    ends = [stretches(begun.stretches(name, i), n, int) if joint else (n,) for i, n in enumerate(shares)]
    keys = tuple(_key(args, member, *each) for member, each in zip(members, ends, strict=True))
    makers: Makers = _makers(members, keys)
    if len(members) > 1:
        makers = {**makers, key: key.build}
    cached(_cache(args, members[0]), makers)
    return _Plan(name, tuple(members), keys, key if len(members) > 1 else None)


def _makers(members: Sequence[_Member], keys: Sequence[AnswerKey]) -> Makers:
    return {key: partial(_maps, member, key) for member, key in zip(members, keys, strict=True)}


def _cache(args: NeoXArgs, member: _Member) -> Path:
    return index_cache_dir(args, member.sources[0].prefix)


def _key(args: NeoXArgs, member: _Member, *ends: int) -> AnswerKey:
    """ends: of the stretches, in samples; the last is how many are wanted."""
    beside, notes = member.labels or member.sources, file_notes(args, member.sources[0].prefix)
    return AnswerKey(
        tuple(source.index_sha256 for source in member.sources),
        tuple(known_sha256(file, notes) for source in beside for file in source.data_files),
        member.documents,
        2 if sample_kind(args) == "pairs" else 1,
        ends[-1],
        args.seq_length,
        data_seed(args),
        packing_of(args),
        Limits(args.max_length, args.max_prompt_length),
        ends[:-1],
    )


def _samples(args: NeoXArgs, members: Sequence[_Member]) -> list[int]:
    """Of one pass over each."""
    if not members:
        return []
    keys, folder = [_key(args, member, 1) for member in members], _cache(args, members[0])
    makers = _makers(members, keys)
    cached(folder, makers)
    entry = load(folder, makers)
    return [int(entry.maps(key, AnswerMaps).counts[COUNTS.index("samples")]) for key in keys]


def _maps(member: _Member, key: AnswerKey) -> AnswerMaps:
    sizes = np.stack([source.sizes[: key.units].astype(np.int64) for source in member.sources], axis=1)
    if member.labels is not None:
        first = np.stack([first_labelled(labels)[: key.units] for labels in member.labels], axis=1)
    else:
        first = first_of_answers(member.sources[0], member.sources[1], key.units)
    shape = (-1, key.per_unit)
    maps = lay_out(
        sizes.reshape(shape), first.reshape(shape), key.num_samples, key.seq_length, key.seed, key.packing, key.limits,
        key.before,
    )  # fmt: skip
    if len(maps.sample_idx) < 2:
        raise DataError(
            f"{member.file}: none of {key.units} documents makes a {member.name} sample: no answer is trained within "
            f"seq_length {key.seq_length}, max_length {key.limits.max_length} and allow_chopped "
            f"{key.packing.allow_chopped}; change these keys"
        )
    return maps


def _load(args: NeoXArgs, plan: _Plan) -> AnswerDataset | BlendedDataset:
    entry = plan.entry(args)
    sets = [
        _loaded(args, member, key, entry.maps(key, AnswerMaps))
        for member, key in zip(plan.members, plan.keys, strict=True)
    ]
    if plan.blend is None:
        return sets[0]
    return BlendedDataset(plan.name, sets, entry.maps(plan.blend, BlendMaps))


def _loaded(args: NeoXArgs, member: _Member, key: AnswerKey, maps: AnswerMaps) -> AnswerDataset:
    count, sources, paired = len(maps.size), len(member.sources), sample_kind(args) == "pairs"
    numbers = np.arange(count)
    two_rows = paired and key.packing.pack_impl != "best_fit"
    kept = np.unique(maps.doc_idx if two_rows else maps.doc_idx // 2)
    for side, reference in enumerate(member.references or ()):
        check_sums(reference, member.sources[side], maps.size[side::2], kept)
    build = partial(
        AnswerDataset, member.name, member.sources, seq_length=key.seq_length, packing=key.packing,
        labels=member.labels, vocab_size=args.padded_vocab_size,
    )  # fmt: skip
    kl = None
    if not paired and couples(args) and args.kto_kl == "drawn":
        parts, prompts, rows = mismatched(
            maps, sources, member.rewards is None, key.seq_length, key.seed, key.packing, key.limits.max_length,
            key.before,
        )  # fmt: skip
        kl = build(parts, prompts, rows, preference_labels=np.ones(count, np.float32))
    parts = [Slices(numbers % sources, numbers // sources, maps.begin, maps.size)]
    labels = _preference_labels(args, member, count)
    return build(
        parts, maps.prompt, maps, preference_labels=labels, two_rows=two_rows, references=member.references, kl=kl
    )


def _preference_labels(args: NeoXArgs, member: _Member, count: int) -> np.ndarray:
    """As of `Batch`. Raises DataError for a reward of 0, which is neither good nor bad."""
    if sample_kind(args) == "pairs":
        return np.ones(count, np.float32)
    if member.rewards is None:  # answers of pairs in turn
        good = np.arange(count) % 2 == 0
    else:
        rewards = np.array([member.rewards.get(i, 0, 1)[0] for i in range(count)])
        zero = np.flatnonzero(rewards == 0)
        if len(zero):
            raise DataError(f"{member.rewards.data_file}: document {zero[0]} has reward 0: KTO reads above or below 0")
        good = rewards > 0
    return np.where(good, 1, -1).astype(np.float32)


def _note(member: _Member, key: AnswerKey, maps: AnswerMaps, batch: int | None) -> list[str]:
    """Lines for the start of the log: how full rows are, and what is cut or left out."""
    count = dict(zip(COUNTS, maps.counts.tolist(), strict=True))
    units, samples = count["units"], count["samples"]
    unit = "pairs" if key.per_unit == 2 else "examples"
    rows = 2 if key.per_unit == 2 and key.packing.pack_impl != "best_fit" else 1
    padding = 100 * (1 - count["tokens"] / (samples * rows * (key.seq_length + 1)))
    line = f"{member.name}: {member.file}: {units} {unit} in {samples * rows} rows of {key.seq_length} tokens"
    if batch is not None:
        line += f", {units / samples * batch:.1f} {unit} a step on average"
    lines = [f"{line}; {padding:.1f} % padding"]
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
