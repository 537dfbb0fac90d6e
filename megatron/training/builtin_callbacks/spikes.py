"""Reports steps whose loss or gradient norm lies far above the recent ones: their documents and texts, in
`spikes.jsonl`."""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.callbacks import Callback, OnGradients, Parts, Step, StepResult, TrainingRun
from megatron.data import Batch
from megatron.data.loader import rank_slice
from megatron.data.provenance import pieces_of
from megatron.distributed import run_on_all_ranks, run_on_each_rank
from megatron.neox_arguments.values.sources import train_sources
from megatron.process.metrics_file import SPIKES_FILE, JsonlLogger
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.metrics.loggers import build_jsonl
from megatron.training.nonfinite_guard import SpikeGuard, on_device
from megatron.training.optimizers import norm_dtype
from megatron.training.run import Training

ROWS = 4  # worst rows of a step that are reported
DOCUMENTS = 8  # worst documents of such a row
CHARACTERS = 400  # of the text of a row's worst document
IN_A_ROW = 8  # spikes, after which such values are a new level and no longer stand out


class _Row(NamedTuple):
    """A row of a step, and its mean loss in that step."""

    loss: float
    tokens: int
    data_rank: int
    micro_batch: int
    row: int


@dataclass
class _JudgedStep:
    """A step that is not judged yet. reading: of its loss, its gradient norm, and whether it was not trained.

    batches: of this rank, on the host. norms: of the gradients on this rank, with their layers.
    """

    step: Step
    result: StepResult
    reading: HostCopy
    batches: list[Batch]
    layers: list[int]
    norms: list[Tensor]


class SpikeReports(Callback):
    """Judges each step once its values are read, and reports the spikes. All ranks judge alike.

    Other steps cost the norms of their gradients, which stay on the device, and one pass that reads them. A
    step's micro-batches are kept, on the host, until the next step has begun.
    """

    def __init__(self, training: Training, file: JsonlLogger | None) -> None:
        """file: spikes.jsonl on rank 0; None on other ranks."""
        sigma = training.args.log_spikes_above_sigma
        assert sigma is not None
        self.training, self._file = training, file
        self._guards = {"loss": SpikeGuard(sigma), "grad_norm": SpikeGuard(sigma)}
        self._in_a_row = 0
        self._batches: list[Batch] = []
        self._layers: list[int] = []
        self._norms: list[Tensor] = []
        self._last_step: _JudgedStep | None = None

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> OnGradients:
        """Keep the step's micro-batches; return the function that measures its gradients."""
        self._batches, self._layers, self._norms = list(batches), [], []
        return self._measure

    def _measure(self, parts: Parts) -> None:
        self._layers = [layer for (layer, _), _ in parts]
        if parts:
            tensors = [part for _, part in parts]
            self._norms = list(torch._foreach_norm(tensors, 2, norm_dtype(tensors[0].device)))

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Judge the step before; begin to copy this step's values to the host."""
        self.settle()
        if step.result is None:
            return
        result, device = step.result, step.result.loss.device
        norm = math.nan if result.grad_norm is None else result.grad_norm
        values = [on_device(value, device) for value in (result.loss, norm, result.untrained)]
        judged = _JudgedStep(step, result, HostCopy(torch.stack(values)), self._batches, self._layers, self._norms)
        self._batches, self._layers, self._norms, self._last_step = [], [], [], judged

    def settle(self) -> None:
        """Judge the step whose values were being copied to the host, and report it if it is a spike."""
        if self._last_step is None:
            return
        judged, self._last_step = self._last_step, None
        loss, norm, untrained = judged.reading.read()
        if untrained:
            return
        values = {"loss": loss, "grad_norm": norm}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name, value in finite.items():
            self._guards[name].decide(value)
        high = [name for name in finite if self._guards[name].skips]
        self._in_a_row = self._in_a_row + 1 if high else 0
        if self._in_a_row > IN_A_ROW:
            for name in high:
                self._guards[name].accept(finite[name])
        elif high:
            with self.training.loop.stopwatch.pause(), self.training.watchdog.phase("reporting a spike"):
                self._report(judged, values, high)

    def _report(self, judged: _JudgedStep, values: Mapping[str, float], high: list[str]) -> None:
        """Write the line of a spike. high: which values stand out."""
        groups, step = self.training.groups, judged.step
        everyone = run_on_all_ranks(groups, lambda: (self._own_rows(judged), _squares(judged)))
        worst = heapq.nlargest(ROWS, (row for rows, _ in everyone for row in rows))
        numbers = sorted({row.micro_batch for row in worst})  # all ranks run the same number of passes
        losses = self.training.engine.token_logprobs([judged.batches[i] for i in numbers])
        token_losses = dict(zip(numbers, (-part.cpu() for part in losses), strict=True))
        described = run_on_all_ranks(groups, lambda: list(self._described(judged, worst, token_losses)))
        if self._file is None:
            return
        rows = [row for _, row in sorted((item for part in described for item in part), key=lambda item: item[0])]
        layers = sorted({layer for _, squares in everyone for layer in squares})
        norms = {str(n): math.sqrt(sum(squares.get(n, 0.0) for _, squares in everyone)) for n in layers}
        end = step.consumed_samples
        recent = {name: {"mean": guard.mean, "sigma": guard.deviation} for name, guard in self._guards.items()}
        self._file.write(
            {
                "iteration": step.iteration, **values, "high": high, "recent": recent,
                "update_skipped": bool(judged.result.spike) or bool(judged.result.skipped),
                "samples": [end - self.training.args.train_batch_size, end],
                "layer_grad_norms": norms,
                "rows": rows, "document_losses_of_iteration": self.training.iteration,
            }
        )  # fmt: skip
        self.training.logger.info(_line(step.iteration, values, high, recent, rows))

    def _is_reporter(self) -> bool:
        """Returns whether this rank reports the rows of its data rank."""
        groups = self.training.groups
        return groups.is_last_stage and groups.rank("tensor") == groups.rank("context") == 0

    def _own_rows(self, judged: _JudgedStep) -> list[_Row]:
        """Returns the worst rows of this rank, if it is the one that reports those of its data rank."""
        rows, rank = [], self.training.groups.rank("data")
        if not self._is_reporter():
            return []
        for i, (losses, batch) in enumerate(zip(judged.result.row_losses, judged.batches, strict=True)):
            counts = batch.loss_weights.sum(1).tolist()
            rows += [
                _Row(loss / count, count, rank, i, row)
                for row, (loss, count) in enumerate(zip(losses.tolist(), counts, strict=True))
                if count
            ]
        return heapq.nlargest(ROWS, rows)

    def _described(
        self, judged: _JudgedStep, worst: list[_Row], token_losses: Mapping[int, Tensor]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (place among the worst rows, its description) for those that this rank reports.

        token_losses: `[batch, seq]` of micro-batches, by their numbers.
        """
        groups, args = self.training.groups, self.training.args
        if not self._is_reporter():
            return
        batch_size = args.train_batch_size
        start, micro = judged.step.consumed_samples - batch_size, batch_size // len(judged.batches)
        for place, row in enumerate(worst):
            if row.data_rank != groups.rank("data"):
                continue
            batch = judged.batches[row.micro_batch]
            samples = rank_slice(start + row.micro_batch * micro, micro, row.data_rank, groups.size("data"))
            chunks = len(batch.tokens) // len(samples)  # rows into which a curriculum splits a sample
            sample, chunk = samples[row.row // chunks], row.row % chunks
            losses, weights = token_losses[row.micro_batch][row.row], batch.loss_weights[row.row]
            documents = self._documents(sample, chunk * batch.tokens.shape[1], losses, weights)
            shown_tokens = batch.tokens[row.row]
            if documents:
                row_token = documents[0]["row_token"]
                shown_tokens = shown_tokens[row_token : row_token + documents[0]["tokens"]]
            text = self.training.tokenizer.detokenize(shown_tokens[:CHARACTERS].tolist())[:CHARACTERS]
            yield place, {
                "sample": sample, "loss": row.loss, "tokens": row.tokens, "documents": documents[:DOCUMENTS],
                "text": text,
            }  # fmt: skip

    def _documents(self, sample: int, row_start: int, losses: Tensor, weights: Tensor) -> list[dict[str, Any]]:
        """Returns the documents of a row, the one with the largest mean loss first.

        row_start: place in the sample of the row's first token. losses, weights: `[seq]`, of the row's
            labels, each of which is the token after its place.
        """
        sources, documents, length = train_sources(self.training.args, per_path=True), [], len(losses)
        for piece in pieces_of(self.training.datasets.train, sample):
            begin, end = max(0, piece.place - row_start), min(length + 1, piece.place + piece.count - row_start)
            trained = slice(max(0, begin - 1), max(0, end - 1))
            count = int(weights[trained].sum())
            if begin < end and count:
                documents.append({
                    "source": sources[piece.source], "file": str(piece.file), "document": piece.document,
                    "first_token": piece.offset + max(0, row_start - piece.place), "row_token": begin,
                    "tokens": end - begin, "loss": float((losses[trained] * weights[trained]).sum()) / count,
                })  # fmt: skip
        return sorted(documents, key=lambda document: -document["loss"])

    def state(self) -> Mapping[str, Any]:
        """Returns the recent values, up to those of the last step."""
        self.settle()
        recent = {name: guard.state() for name, guard in self._guards.items()}
        return {**recent, "in_a_row": self._in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the recent values."""
        for name, guard in self._guards.items():
            guard.restore(state[name])
        self._in_a_row = state["in_a_row"]

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Drop the last step: its report is the work of all ranks."""
        self._last_step = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _squares(judged: _JudgedStep) -> dict[int, float]:
    """Returns the sum of squares of this rank's gradients by layer."""
    squares: dict[int, float] = {}
    for layer, norm in zip(judged.layers, judged.norms, strict=True):
        squares[layer] = squares.get(layer, 0.0) + float(norm) ** 2
    return squares


def _line(
    iteration: int, values: Mapping[str, float], high: list[str], recent: Mapping[str, Any], rows: list[dict[str, Any]]
) -> str:
    parts = [f"{name} {values[name]:.4g} (recent {recent[name]['mean']:.4g})" for name in high]
    worst = next((document for row in rows for document in row["documents"][:1]), None)
    text = f"step {iteration}: spike of {' and '.join(parts)}"
    if worst is not None:
        text += f"; worst row: document {worst['document']} of {worst['file']}"
    return f"{text}; see {SPIKES_FILE} (log_spikes_above_sigma)"


def build_spike_reports(training: Training) -> list[SpikeReports]:
    """Returns [SpikeReports] if `log_spikes_above_sigma` is set, else []. All ranks call it together.

    Raises ConfigError if the file cannot be written.
    """
    if training.args.log_spikes_above_sigma is None:
        return []

    def build() -> JsonlLogger | None:
        if training.groups.world_rank > 0:
            return None
        run_id, start = training.checkpointer.run_id, training.progress.iteration
        return build_jsonl(training.args, SPIKES_FILE, start, run_id, training.logger.warning)

    return [SpikeReports(training, run_on_each_rank(training.groups, build))]
