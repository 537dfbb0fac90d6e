"""The training data of a past run, opened as the run opened it, and the rows of a step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpointing import CheckpointError, Manifest
from megatron.data import (
    Batch,
    DataState,
    SampleSet,
    build_datasets,
    data_fingerprint,
    has_curriculum,
    order_keys,
    order_sha256,
    row_length,
    step_length,
    train_loader,
)
from megatron.data.blending import BlendedDataset, RepeatedDataset
from megatron.data.loader import train_slices
from megatron.data.packed_dataset import PackedDataset
from megatron.data.provenance import Piece, pieces_of
from megatron.data.run_datasets import WrappedSet
from megatron.data.text_sets import text_samples_per_epoch
from megatron.experiments.errors import RunError
from megatron.experiments.past_run import PastRun
from megatron.generation.from_huggingface import tokenizer_keys
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import method_name
from megatron.tokenizer import Tokenizer, build_tokenizer, with_masked_ids
from megatron.training.checkpoint.same_run import begun_of, check_same_run
from megatron.training.method import Method, find_method
from megatron.training.setup import with_length

ONE_RANK: Mapping[str, Any] = {
    "model_parallel_size": 1, "pipe_parallel_size": 1, "context_parallel_size": 1, "expert_parallel_size": 1,
    "sequence_parallel": False,
}  # fmt: skip
"""The keys of a layout in which each rank has the whole model."""


@dataclass(frozen=True, eq=False)
class Row:
    """A sample of a step. tokens: `[length + 1]`, the last one is only a label; padding is left out.

    row: its number in the step. sample: in the training order. rank, micro_batch: the data-parallel rank that
    read it, and in which of its micro-batches of the step.
    """

    row: int
    sample: int
    rank: int
    micro_batch: int
    pieces: tuple[Piece, ...]
    tokens: np.ndarray


@dataclass(frozen=True)
class RunData:
    """The training set of a run with the configuration of one of its checkpoints.

    state: position of that checkpoint, for which the set is laid out. members: the set of each source.
    """

    run: PastRun
    args: NeoXArgs
    method: Method
    tokenizer: Tokenizer
    state: DataState
    dataset: SampleSet
    members: tuple[PackedDataset, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """The data path of each source, without .bin/.idx."""
        return tuple(str(member.indexed.data_file).removesuffix(".bin") for member in self.members)

    def pieces(self, sample: int, length: int | None = None) -> Iterator[Piece]:
        """Yields the parts of documents in a sample. length: of the row, if a curriculum truncates it."""
        end = (self.args.seq_length if length is None else length) + 1
        for piece in pieces_of(self.dataset, sample):
            if piece.place < end:
                yield replace(piece, count=min(piece.count, end - piece.place))

    def length(self, step: int) -> int:
        """Returns how many tokens of each sample a step reads as inputs."""
        return step_length(self.args, step)

    def rows(self, step: int) -> list[Row]:
        """Returns the samples of a step in their order."""
        args, samples, length = self.args, self.run.span_of(step).samples(step), self.length(step)
        check_samples(self.run, step, samples, self.dataset)
        places: dict[int, tuple[int, int]] = {}
        for rank in range(args.data_parallel_size):
            for micro_batch, numbers in enumerate(samples_of_rank(args, samples, rank)):
                places |= dict.fromkeys(numbers, (rank, micro_batch))
        rows = []
        for row, sample in enumerate(samples):
            pieces = tuple(self.pieces(sample, length))
            filled = sum(piece.count for piece in pieces)
            rank, micro_batch = places[sample]
            tokens = self.dataset[sample].tokens[:filled]
            rows.append(Row(row, sample, rank, micro_batch, pieces, tokens))
        return rows

    def batch(self, step: int) -> Batch:
        """Returns all rows of a step as one `Batch`, made by the run's own loader."""
        samples, args = self.run.span_of(step).samples(step), self.args
        check_samples(self.run, step, samples, self.dataset)
        one_rank = without_world(args).replace(
            train_batch_size=len(samples), train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=1,
            **ONE_RANK,
        ).for_world(1)  # fmt: skip
        steps = train_loader(
            self.dataset,
            one_rank,
            data_rank=0,
            data_size=1,
            consumed_samples=samples.start,
            eod=self.tokenizer.eod,
            collate=self.method.collation(args, self.tokenizer.eod),
            num_workers=0,
            length=(lambda _: row_length(args, step)) if has_curriculum(args) else None,
            split_rows=args.seq_curriculum is not None,
        )
        return next(steps)[0]


def check_samples(run: PastRun, step: int, samples: range, dataset: SampleSet | None) -> None:
    """Raises RunError if the data that are laid out end before the samples of a step."""
    if dataset is None or samples.stop > len(dataset):
        raise RunError(
            f"{run.path}: step {step} reads samples up to {samples.stop - 1}, but its last checkpoint was of a run "
            f"with {len(dataset or ())}, which was made longer since; save a checkpoint of the longer one"
        )


def samples_of_rank(args: NeoXArgs, samples: range, rank: int) -> Iterator[range]:
    """Yields the samples of each micro-batch that a data-parallel rank reads in the step of these samples."""
    accumulation, ranks = args.gradient_accumulation_steps, args.data_parallel_size
    return train_slices(samples.stop, len(samples), accumulation, rank, ranks, samples.start)


def index_cache(run: PastRun, args: NeoXArgs) -> str:
    """Returns the folder of a run's index maps: as configured, else in the run's folder where it is now."""
    return args.index_cache_dir or str(run.path / "index_cache")


def without_world(args: NeoXArgs) -> NeoXArgs:
    """Returns the configuration before the number of ranks was known, so that another can be set."""
    return replace(args, world_size=None)


def with_tokenizer(args: NeoXArgs, checkpoint: Path) -> NeoXArgs:
    """Returns the configuration, with the checkpoint's tokenizer if `vocab_file` is not there any more."""
    if args.vocab_file is None or Path(args.vocab_file).exists() or not (checkpoint / "tokenizer").is_dir():
        return args
    return args.replace(**tokenizer_keys(checkpoint / "tokenizer"))


def with_epochs(args: NeoXArgs, manifest: Manifest) -> NeoXArgs:
    """Returns the configuration with `train_epochs`, if the run had it.

    A checkpoint has the number of steps instead. Passes are alike, so enough of them have the same samples.
    """
    if not manifest.data["order"].get("train_epochs") or args.train_epochs is not None:
        return args
    samples = manifest.consumed_samples + max(0, args.train_iters - manifest.iteration) * args.train_batch_size
    samples_per_epoch = text_samples_per_epoch(args.replace(train_epochs=1, train_iters=None))
    return args.replace(train_epochs=max(1, -(-samples // samples_per_epoch)), train_iters=None)


def open_data(run: PastRun, checkpoint: int) -> RunData:
    """Opens the training set of a run as it was laid out at a checkpoint, and checks that it is the same.

    Raises RunError if data files, tokenizer or order differ from the checkpoint's manifest, or if the
    run does not train on texts.
    """
    args, manifest = run.args_at(checkpoint), run.manifest(checkpoint)
    if method_name(args) != "language_modelling":
        raise RunError(
            f"{run.path}: train_impl is {args.train_impl} ({method_name(args)}); only the batches of next-token "
            "prediction on texts can be read again"
        )
    args = with_tokenizer(args, run.checkpoints[checkpoint])
    args = with_epochs(args, manifest)
    tokenizer, method = build_tokenizer(args), find_method(args)
    args = with_masked_ids(args, tokenizer).replace(index_cache_dir=index_cache(run, args))
    state, epochs = begun_of(manifest, method), args.train_epochs
    args = with_length(args, method, ParallelGroups.single(), state, lambda line: None)
    datasets = build_datasets(
        args, train_batch_size=args.train_batch_size, on_one_rank=lambda work: work(), epochs=epochs, data_state=state
    )
    dataset = method.wrap_datasets(args, datasets, tokenizer.eod).train
    assert dataset is not None
    _check(run, args, manifest, dataset, tokenizer, epochs)
    return RunData(run, args, method, tokenizer, state, dataset, packed_members(dataset))


def _check(
    run: PastRun, args: NeoXArgs, manifest: Manifest, dataset: SampleSet, tokenizer: Tokenizer, epochs: int | None
) -> None:
    digest = order_sha256(dataset, manifest.consumed_samples)
    record = {"files": data_fingerprint(args), "order": order_keys(args, epochs), "consumed_sha256": digest}
    path = run.checkpoints[manifest.iteration]
    try:
        check_same_run(args.replace(allow_changed_data=False), path, manifest, True, record, tokenizer)
    except CheckpointError as problem:
        text = str(problem).partition(";")[0]
        raise RunError(f"{text}; put back what the run had, or its batches cannot be read again") from problem


def packed_members(dataset: SampleSet) -> tuple[PackedDataset, ...]:
    """Returns the set of each source of a training set."""
    while isinstance(dataset, WrappedSet | RepeatedDataset):
        dataset = dataset.dataset
    members = dataset.members if isinstance(dataset, BlendedDataset) else [dataset]
    assert all(isinstance(member, PackedDataset) for member in members)
    return tuple(members)  # type: ignore[arg-type]
