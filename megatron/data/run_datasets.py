"""What building the data of a run gives: its train, validation and test sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.data.blending import BlendedDataset, RepeatedDataset
from megatron.data.index_maps import SegmentEnds
from megatron.data.packed_dataset import PackedDataset
from megatron.data.preferences.preference_dataset import PreferenceDataset
from megatron.data.preferences.reference_scores import ReferenceScoredDataset
from megatron.data.sequences import SequenceDataset
from megatron.data.teacher_scores import TeacherScoredDataset

SampleSet = (
    PackedDataset
    | BlendedDataset
    | RepeatedDataset
    | PreferenceDataset
    | SequenceDataset
    | ReferenceScoredDataset
    | TeacherScoredDataset
)


@dataclass(frozen=True)
class SetContents:
    """All that decides the rows of a set, for caches that are made from them.

    layout: hex SHA-256 of labels, keys and order. files: those with the tokens. hash_cache: the folder in
    which the hashes of these files are kept (`cached_sha256`).
    """

    layout: str
    files: tuple[Path, ...]
    hash_cache: Path


@dataclass(frozen=True)
class Datasets:
    """The sets of one run; a set is None where the split leaves it no document or no sample is asked of it.

    forget, retain: those of unlearning, `ga_dataset` and `gd_retain_dataset`. log_lines: lines about the sets
    for the start of the log. contents: of sets that a reference scores. segment_ends: how the order of
    each set is laid out, as `DataState` takes it when the run is resumed.
    """

    train: SampleSet | None
    valid: SampleSet | None
    test: SampleSet | None
    log_lines: tuple[str, ...] = ()
    contents: Mapping[str, SetContents] = field(default_factory=dict)
    segment_ends: SegmentEnds = field(default_factory=dict)
    forget: SampleSet | None = None
    retain: SampleSet | None = None
