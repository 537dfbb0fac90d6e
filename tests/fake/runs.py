"""Running a case where the shim is loaded: the run's set-up, and a step as far as fake tensors go."""

import contextlib
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._dynamo.utils
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.data.batch import Batch, collate
from megatron.data.preferences.responses import Responses, share_prefixes
from megatron.model import HiddenStates, InferenceContext, Stage, forward_only, with_context
from megatron.model.init import init_stage, parameters_with_specs
from megatron.mpu import DTYPES, ParallelGroups, configured_groups, gather_from_tensor
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective, label_logprobs
from megatron.planning.dry_run import line_of, run_rank
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
from megatron.planning.report import Collective
from megatron.training.engine import Engine, StepLoss
from megatron.training.native.engine import NativeEngine
from megatron.training.nonfinite_guard import GradientWatch, most_skips
from megatron.training.optimizers import clip_gradients, gradient_norm
from megatron.training.setup import build_engine
from tests.fake.layouts import MODEL, Case
from tests.fake.mistakes import MISTAKES

EOD = 0


def run(case: Case) -> dict[str, Any]:
    """Returns the observations of a case; `error` names what stopped it and our line."""
    mistake = MISTAKES[case.mistake]() if case.mistake else contextlib.nullcontext()
    if case.planned:
        with mistake:
            return asdict(run_rank(NeoXArgs.from_dict({**MODEL, **case.values}).for_world(case.world), case.rank))
    streams, report = Streams(), dict[str, Any](error=None)
    observer = Observer(streams)
    with fake_cuda(case.capability, streams), resizes_seen(observer), process_group(case.rank, case.world), mistake:
        try:
            args = NeoXArgs.from_dict({**MODEL, **case.values}).for_world(case.world)
            groups = configured_groups(args, DEVICE)
            with FakeTensorMode(), shared_out_evenly(args):
                if case.native:
                    _run_native(args, groups, observer, report)
                else:
                    _run(case, args, groups, observer, report)
        except Exception as problem:
            report["error"] = f"{type(problem).__name__}: {problem} at {line_of(problem)}"
    collectives = [summary(collective) for collective in observer.collectives]
    return report | {"findings": observer.findings, "collectives": collectives, "kernels": observer.kernels,
                   "varlen": observer.varlen,
                   "scaled": [[*call, times] for call, times in observer.scaled.items()]}  # fmt: skip


def summary(collective: Collective) -> tuple[int, int, int, str, int]:
    """(first rank, stride between ranks, number of ranks, kind, bytes)."""
    ranks = collective.ranks
    stride = ranks[1] - ranks[0]
    assert ranks == tuple(range(ranks[0], ranks[-1] + 1, stride))
    return ranks[0], stride, len(ranks), collective.kind, collective.size


def _run_native(args: NeoXArgs, groups: ParallelGroups, observer: Observer, report: dict[str, Any]) -> None:
    """Runs two steps: the first makes gradients and optimizer states, the second is observed.

    kept, peak: bytes before it, and at most within it; parts: bytes that the engine says it keeps.
    """
    batches = [make_batch(args, groups, Case(), None)] * args.gradient_accumulation_steps
    with observer:
        engine = build_engine(args, groups, engine=NativeEngine)
        report["construction"] = observer.peak
        observer.findings.clear()  # what is copied to the device once; in steps nothing is
        if not args.compile:
            engine.train_step(batches, 1e-4)
    if args.compile:
        engine.train_step(batches, 1e-4)
        report["compiled"] = compiled()
    observer.begin_step(args.seq_length)
    with observer:
        report["kept"] = observer.live
        engine.train_step(batches, 1e-4)
        report["peak"] = observer.peak
    report["parts"] = {part: sum(map(local_bytes, tensors)) for part, tensors in engine.tensors().items()}
    if args.compile:
        report["compiled again"], report["calls compiled"] = compiled(), calls_compiled()


def _run(case: Case, args: NeoXArgs, groups: ParallelGroups, observer: Observer, report: dict[str, Any]) -> None:
    with observer:
        engine = build_engine(args, groups, engine=ModelStep)
        report["parameters"] = sum(p.numel() * p.element_size() for p in engine.stage.parameters())
        report["construction"] = observer.peak
    steps = range(max(1, len(case.documents)))
    batches = [make_batch(args, groups, case, *(rows[i] if rows else None for rows in (case.documents, case.prefixes)))
               for i in steps]  # fmt: skip
    if args.compile:
        engine.forward_and_backward(batches[0])
        report["compiled"] = compiled()
    observer.begin_step(args.seq_length)
    with observer:
        for batch in batches:
            engine.forward_and_backward(batch)
            report["passes"] = observer.peak
            engine.finish()
            if case.validates:
                engine.token_logprobs([batch])
        missing = [name for name, p in engine.stage.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing, f"no gradients: {missing}"
        if case.inference:
            score_and_generate(engine, batches[0])
    if args.compile:
        report["compiled again"], report["calls compiled"] = compiled(), calls_compiled()


def compiled() -> dict[str, int]:
    """How many graphs dynamo has compiled, and how often it has broken one."""
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def calls_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["calls_captured"]


class ModelStep(Engine):
    """A step as DeepSpeed's engine takes it: weight over data ranks, passes, verdict, norm, clipping."""

    name = "model step"

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective) -> None:
        self.args, self.groups, self._stage, self.objective = args, groups, stage, objective
        self.dtype = DTYPES[args.params_dtype]
        init_stage(stage, args, groups, self.dtype)
        trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self.watch = GradientWatch(list(trained), groups.device, most_skips(args))
        self.watch.watch(list(trained.values()))
        self._loss = StepLoss(objective, groups, self.watch)
        stage.train()

    @staticmethod
    def notes(args: NeoXArgs) -> list[str]:
        return []

    def forward_and_backward(self, batch: Batch) -> None:
        weight = self.groups.sum(self.objective.weight(batch), "data")
        self.watch.begin(weight)
        self._loss.begin(1 / weight.clamp(min=1.0))
        self.stage.zero_grad()
        hidden = None if self.groups.is_first_stage else self.received(batch)
        out = self.stage(hidden, batch, partial(self._loss.scaled_loss, batch=batch))
        if isinstance(out, HiddenStates):
            out.hidden_states.backward(torch.empty_like(out.hidden_states))
        else:
            out.backward()

    def finish(self) -> None:
        """Runs all work between the last backward and the update."""
        self.watch.judge()
        sharded, replicated = [], []
        for _, _, param, spec in parameters_with_specs(self.stage, self.args):
            (replicated if spec.axis is None or self.groups.size("tensor") == 1 else sharded).append(param)
        norm = gradient_norm(sharded, replicated, self.groups) + self.watch.verdict
        clip_gradients([*sharded, *replicated], norm, 1.0)

    def received(self, batch: Batch) -> HiddenStates:
        rows, seq = batch.tokens.shape
        if self.args.sequence_parallel:
            seq //= self.groups.size("tensor")
        shape, dtype = (seq, rows, self.args.hidden_size), DTYPES[self.args.params_dtype]
        return HiddenStates(torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=True))


def make_batch(
    args: NeoXArgs,
    groups: ParallelGroups,
    case: Case,
    documents: list[list[int]] | None,
    prefixes: list[int] | None = None,
) -> Batch:
    """A micro-batch as collation makes it, its tensors then fake ones on the device."""
    rows, seq = args.train_micro_batch_size_per_gpu, args.seq_length
    windows = np.ones((rows, seq + 1), np.int64)
    for row, starts in enumerate(documents or []):
        windows[row, [start - 1 for start in starts if start]] = EOD
    packed = documents is not None
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        batch = collate(windows, eod=EOD, reset_attention_mask=packed, reset_position_ids=packed)
        if prefixes is not None:
            begins = torch.zeros_like(batch.tokens)
            for row, starts in enumerate(documents or []):
                begins[row, starts] = 1
            batch = share_prefixes(batch, begins.flatten().cumsum(0).view_as(begins) - 1, np.array(prefixes))
        batch = with_context(batch, args, groups)
    if case.pairs:
        labels = torch.empty(rows if prefixes is None else len(prefixes))
        responses = torch.empty(batch.tokens.shape, dtype=torch.int64)
        batch = replace(batch, method=Responses(responses, labels, labels))
    return batch.map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE))


def score_and_generate(engine: ModelStep, batch: Batch) -> None:
    """Log-probabilities of the batch, its tokens into a cache, and one more token of each row."""
    args, groups, stage = engine.args, engine.groups, engine.stage.eval()
    rows, seq = batch.tokens.shape
    read = partial(label_logprobs, group=groups.group("tensor"), columns=args.softmax_rows)
    dtype = DTYPES[args.params_dtype]
    forward_only(stage, [batch], args, groups, read, dtype=dtype, shape=lambda batch: tuple(batch.tokens.shape))
    cache, blocks = stage.empty_cache(32, 16), 14
    numbers = partial(torch.zeros, dtype=torch.int64, device=DEVICE)
    for width, positions in ((seq, None), (1, numbers(rows, 1))):
        view = cache.with_rows(numbers(rows * width), numbers(rows, blocks))
        context = InferenceContext(cache=view, last_tokens=numbers(rows), logit_positions=numbers(rows))
        tokens = numbers(rows, width)
        with torch.no_grad():
            out = stage(None, Batch(tokens, tokens, tokens, positions), context=context)
        gather_from_tensor(out, groups.group("tensor"))
