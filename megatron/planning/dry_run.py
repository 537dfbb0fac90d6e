"""One rank of a run on fake CUDA: its real set-up, and two steps of its engine.

The steps have few micro-batches: enough that a pipeline holds as many activations as it ever does.
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.data import rows_per_sample, trains_preferences
from megatron.data.batch import Batch, collate
from megatron.data.preferences.responses import Responses
from megatron.model import with_context
from megatron.mpu import ParallelGroups, configured_groups
from megatron.mpu.pending_sends import PendingSends
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import scores_reference
from megatron.planning.fake_cuda.devices import (
    DEVICE,
    fake_cuda,
    local_bytes,
    process_group,
    resizes_seen,
    shared_out_evenly,
)
from megatron.planning.fake_cuda.observer import Observer
from megatron.planning.fake_cuda.streams import Streams
from megatron.planning.report import RankReport
from megatron.training.native.engine import NativeEngine
from megatron.training.setup import build_engine


def run_rank(args: NeoXArgs, rank: int) -> RankReport:
    """Returns the report of a rank. Needs a process whose torch has fake CUDA (`fake_cuda.shim`).

    args: with the world size, the vocabulary and few micro-batches resolved.
    """
    assert args.world_size is not None
    streams = Streams()
    observer, report = Observer(streams), RankReport(rank)
    with fake_cuda(streams=streams), resizes_seen(observer), process_group(rank, args.world_size):
        try:
            groups = configured_groups(args, DEVICE)
            report = replace(report, coordinates=dict(groups.ranks), groups=_handles(groups))
            # Tensors that are sent are received at once: the fake network does not tell when.
            sent_at_once = mock.patch.object(PendingSends, "add", lambda *args: None)
            with FakeTensorMode(), shared_out_evenly(args), sent_at_once:
                report = _run_steps(args, groups, observer, report)
        except Exception as problem:
            report = replace(report, error=f"{type(problem).__name__}: {problem} ({line_of(problem)})")
    return replace(report, notes=tuple(observer.findings))


def _handles(groups: ParallelGroups) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of the process groups themselves, whatever `groups` says of them."""
    return {
        axis: tuple(dist.get_process_group_ranks(handle))
        for axis, handle in groups.handles.items()
        if handle is not None
    }


def _run_steps(args: NeoXArgs, groups: ParallelGroups, observer: Observer, report: RankReport) -> RankReport:
    """The first step makes gradients and optimizer states; the second is reported."""
    batches = [example_batch(args, groups)] * args.gradient_accumulation_steps
    with observer:
        engine = build_engine(args, groups, engine=NativeEngine)
        report = replace(report, construction_bytes=observer.peak)
        observer.findings.clear()  # what is copied to the device once
        engine.train_step(batches if has_chunks(args) else batches[:1], 1e-4)
        setup = tuple(observer.collectives)
        observer.begin_step(0)
        kept_bytes = observer.live
        engine.train_step(batches, 1e-4)
    layers = tuple(spec.index for spec in engine.stage.specs)
    parts = {part: sum(map(local_bytes, tensors)) for part, tensors in engine.tensors().items()}
    return replace(
        report,
        layers=layers,
        parts=parts,
        kept_bytes=kept_bytes,
        step_bytes=observer.peak,
        collectives=tuple(observer.collectives),
        setup=setup,
        num_groups=len(dist.distributed_c10d._world.pg_names),
    )


def has_chunks(args: NeoXArgs) -> bool:
    """Returns whether the schedule needs as many micro-batches as pipeline ranks."""
    return args.pp > 1 and args.stages_per_rank > 1


def example_batch(args: NeoXArgs, groups: ParallelGroups) -> Batch:
    """Returns a micro-batch of full rows, on the device: one document in each, or one or two answers."""
    rows = args.train_micro_batch_size_per_gpu * rows_per_sample(args)
    windows = np.ones((rows, args.seq_length + 1), np.int64)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        batch = collate(
            windows, eod=0, reset_attention_mask=args.reset_attention_mask, reset_position_ids=args.reset_position_ids
        )
        if trains_preferences(args):
            batch = _with_answers(batch, args)
        batch = with_context(batch, args, groups)
    return batch.map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE))


def _with_answers(batch: Batch, args: NeoXArgs) -> Batch:
    """Returns a micro-batch whose rows are answers: one in each row, or both of a pair if rows are packed.

    The reference's log-probabilities are there, as `dpo_reference: cache` has them.
    """
    rows, seq = batch.tokens.shape
    in_row = 2 if args.pack_impl == "best_fit" else 1
    ids = torch.arange(in_row * rows).repeat_interleave(seq // in_row).view(rows, -1)
    ids = torch.nn.functional.pad(ids, (0, seq - ids.shape[1]), value=-1)
    numbers = torch.ones(in_row * rows)
    return replace(batch, method=Responses(ids, numbers, numbers if scores_reference(args) else None))


def line_of(problem: BaseException) -> str:
    """Returns the last line of the package, planning aside, on the way to a problem."""
    trace, line = problem.__traceback__, "no line of megatron"
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/megatron/" in file and "/planning/" not in file:
            line = f"megatron/{file.rsplit('/megatron/')[-1]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
