"""Describes a past step for JSON and as text: its rows with documents and texts, and losses by source."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron.experiments.errors import RunError
from megatron.experiments.replay import TokenLosses
from megatron.experiments.run_data import Row, RunData
from megatron.neox_arguments import NeoXArgs


def describe_step(data: RunData, step: int, losses: TokenLosses | None, rank: int | None = None) -> dict[str, Any]:
    """Returns a step as an object for JSON. rank: data-parallel rank whose rows are listed; None: all."""
    samples, rows = data.run.span_of(step).samples(step), data.rows(step)
    described: dict[str, Any] = {
        "run": str(data.run.path), "step": step, "first_sample": samples.start, "samples": len(samples),
        "taken": step <= data.run.last_step, "data_parallel_ranks": data.args.data_parallel_size,
        "sources": {source: facts for source, facts in _sources(data, rows, losses).items() if facts["tokens"]},
    }  # fmt: skip
    if losses is not None:
        described["loss"] = {
            "mean": losses.mean, "logged": losses.logged, "checkpoint": str(losses.checkpoint),
            "weights_of_the_step": losses.has_weights, "exact": losses.is_exact,
        }  # fmt: skip
    described["rows"] = [_row(data, row, losses) for row in rows if rank in (None, row.rank)]
    return described


def _row(data: RunData, row: Row, losses: TokenLosses | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "row": row.row, "sample": row.sample, "rank": row.rank, "micro_batch": row.micro_batch,
        "pieces": [
            {
                "source": data.sources[piece.source], "document": piece.document, "offset": piece.offset,
                "place": piece.place, "tokens": piece.count,
                "text": data.tokenizer.detokenize(row.tokens[piece.place : piece.place + piece.count].tolist()),
            }
            for piece in row.pieces
        ],
        "tokens": row.tokens.tolist(),
    }  # fmt: skip
    if losses is not None:
        label_losses, weights = losses.rows[row.sample]
        pairs = zip(label_losses.tolist(), weights.tolist(), strict=True)
        values["losses"] = [loss if weight else None for loss, weight in pairs]
        values["loss"] = _mean(label_losses, weights)
    return values


def _mean(losses: np.ndarray, weights: np.ndarray) -> float | None:
    return float((losses * weights).sum() / weights.sum()) if weights.any() else None


def _sources(data: RunData, rows: Sequence[Row], losses: TokenLosses | None) -> dict[str, dict[str, Any]]:
    """Returns the tokens of each source in a step, and the mean loss of the labels that come from it."""
    names = list(dict.fromkeys(data.sources))  # a path that is listed twice is one source
    tokens, sums = np.zeros(len(names), np.int64), np.zeros((len(names), 2))
    for row in rows:
        source = names.index(data.sources[row.pieces[0].source])  # blends draw full rows
        tokens[source] += len(row.tokens)
        if losses is not None:
            label_losses, weights = losses.rows[row.sample]
            sums[source] += (label_losses * weights).sum(), weights.sum()
    facts: dict[str, dict[str, Any]] = {}
    for name, count, (total, labels) in zip(names, tokens.tolist(), sums.tolist(), strict=True):
        facts[name] = {"tokens": count}
        if losses is not None:
            facts[name] |= {"labels": int(labels), "loss": total / labels if labels else None}
    return facts


def step_lines(described: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that show what `describe_step` has returned."""
    end = described["first_sample"] + described["samples"]
    yield f"step {described['step']} of {described['run']}: samples {described['first_sample']} to {end - 1}"
    if not described["taken"]:
        yield "  the run has not taken this step yet"
    if (loss := described.get("loss")) is not None:
        logged = (
            "metrics.jsonl has no row of this step alone" if loss["logged"] is None else f"logged: {loss['logged']!r}"
        )
        yield f"loss {loss['mean']!r} under the weights of {loss['checkpoint']} ({logged})"
        if not loss["weights_of_the_step"]:
            yield "  these are not the weights that took the step, so this is not its loss in training"
        elif not loss["exact"]:
            yield "  its last bits may differ from training's: other ranks, compiled blocks, or a step that was split"
        elif loss["logged"] not in (None, loss["mean"]):
            yield "  warning: this is not the logged loss: another kind of device computed it, or files have changed"
    for source, facts in described["sources"].items():
        value = f", loss {facts['loss']:.4f} over {facts['labels']} labels" if facts.get("labels") else ""
        yield f"  {source}: {facts['tokens']} tokens{value}"
    for row in described["rows"]:
        value = f", loss {row['loss']:.4f}" if row.get("loss") is not None else ""
        yield f"row {row['row']}: sample {row['sample']}, rank {row['rank']}, micro-batch {row['micro_batch']}{value}"
        for piece in row["pieces"]:
            span = f"tokens {piece['offset']} to {piece['offset'] + piece['tokens'] - 1}"
            yield f"  {piece['source']}, document {piece['document']}, {span}:"
            yield from (f"    {line}" for line in piece["text"].split("\n"))


def check_rank(args: NeoXArgs, rank: int | None) -> None:
    """Raises RunError if a step has no data-parallel rank of this number."""
    if rank is not None and not 0 <= rank < args.data_parallel_size:
        last = args.data_parallel_size - 1
        raise RunError(f"--rank {rank}: the step was read by data-parallel ranks 0 to {last}; give one of them")
