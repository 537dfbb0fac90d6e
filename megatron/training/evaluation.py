"""Computes validation and test loss, in every parallel layout, also for sets smaller than a batch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch, SampleSet, collation, eval_batches, trains_preferences
from megatron.data.set_config import valid_sets
from megatron.model import eager_blocks
from megatron.mpu import HeadInput, token_logprobs_and_statistics
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.objectives.language_modelling import METRICS
from megatron.training.engine import Engine


@dataclass(frozen=True)
class ValidationResult:
    """The loss on a validation or test set, and other quantities measured on it.

    lm_loss: mean over the tokens with a loss weight, in nats.
    unigram_entropy: entropy of the label frequencies, in nats: the loss of a model that knows only how often
        each token occurs.
    tokens_per_character: tokens per character of their text; None if not requested.
    metrics: means over the same tokens of entropy and mean_token_accuracy, if training logs them too.
    """

    lm_loss: float
    unigram_entropy: float
    tokens_per_character: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """The perplexity exp(lm_loss), where the loss is capped at 20 as in GPT-NeoX."""
        return math.exp(min(self.lm_loss, 20.0))  # in this order a NaN stays one

    @property
    def character_perplexity(self) -> float | None:
        """The perplexity per character of the detokenized text; None if characters were not counted.

        Special tokens add their loss, but no characters.
        """
        per_character = self.tokens_per_character
        return None if per_character is None else math.exp(min(self.lm_loss * per_character, 20.0))


@dataclass(frozen=True)
class ValidationSums:
    """The sums over the tokens of a set from which its `ValidationResult` follows; sums of sets add up.

    totals: `[3 + metrics]` fp64: loss, tokens, characters, metrics. label_counts: `[vocabulary]` int64.
    names: of the metrics. counts_characters: whether characters were counted.
    """

    totals: Tensor
    label_counts: Tensor
    names: tuple[str, ...]
    counts_characters: bool

    def __add__(self, further: "ValidationSums") -> "ValidationSums":
        totals, counts = self.totals + further.totals, self.label_counts + further.label_counts
        return ValidationSums(totals, counts, self.names, self.counts_characters)

    def result(self) -> ValidationResult:
        """Returns the means over all tokens of the set, or of the sets whose sums were added."""
        label_counts = self.label_counts[self.label_counts > 0].double()
        shares = label_counts / label_counts.sum()
        loss, tokens, characters, *sums = self.totals.tolist()
        per_character = tokens / max(1.0, characters) if self.counts_characters else None
        means = {name: value / max(1.0, tokens) for name, value in zip(self.names, sums, strict=True)}
        return ValidationResult(loss / max(1.0, tokens), float(-(shares * shares.log()).sum()), per_character, means)


def evaluate(
    engine: Engine,
    dataset: SampleSet,
    num_samples: int,
    eod: int | None,
    detokenize: Callable[[Iterable[int]], str] | None = None,
    look_for_stop: Callable[[], None] = lambda: None,
) -> ValidationSums:
    """Returns the sums of loss and metrics over the first `num_samples` samples of a set, or over all if it
    has fewer.

    eod: the tokenizer's end-of-document token. detokenize: if set, the characters of the text are counted.
    look_for_stop: called before each chunk of micro-batches, by all ranks together; an exception that it
    raises ends the evaluation.
    """
    names, groups = statistics_of(engine.objective), engine.groups
    totals = torch.zeros(3 + len(names), dtype=torch.float64)  # loss, tokens, characters, metrics
    counts = torch.zeros(engine.args.padded_vocab_size, dtype=torch.int64)
    for chunk in _chunks(engine, dataset, num_samples, eod, look_for_stop):
        for batch, (logprobs, *metrics) in zip(chunk, _values(engine, chunk), strict=True):
            weights = batch.loss_weights.double()
            totals[:2] += torch.stack([-(logprobs.double().cpu() * weights).sum(), weights.sum()])
            for place, values in enumerate(metrics, start=3):
                totals[place] += (values.double().cpu() * weights).sum()
            if detokenize is not None:
                rows = zip(batch.labels, batch.loss_weights, strict=True)
                totals[2] += sum(len(detokenize(labels[weighted > 0].tolist())) for labels, weighted in rows)
            counts += batch.labels[batch.loss_weights > 0].bincount(minlength=len(counts))
    if groups.group("data") is not None:
        totals, counts = totals.to(groups.device), counts.to(groups.device)
        dist.all_reduce(totals, group=groups.group("data"))
        dist.all_reduce(counts, group=groups.group("data"))
    return ValidationSums(totals, counts, names, detokenize is not None)


def _values(engine: Engine, batches: list[Batch]) -> list[Tensor]:
    """Returns a tensor `[1 + metrics, batch, seq]` for each micro-batch: log p(label) of every token, then
    every token's value of each metric in `statistics_of`."""
    names = statistics_of(engine.objective)
    if not names:
        return [logprobs[None] for logprobs in engine.token_logprobs(batches)]

    def read(head: HeadInput, batch: Batch) -> Tensor:
        group, columns = engine.groups.group("tensor"), engine.args.softmax_rows
        labels, places = batch.labels.t(), batch.loss_places
        logprobs, statistics = token_logprobs_and_statistics(head, labels, group, columns, places)
        values = {"entropy": statistics.entropy, "mean_token_accuracy": statistics.is_top}
        return torch.stack([logprobs.t(), *(values[name].t().float() for name in names)])

    return engine.forward_only(batches, read, lambda batch: (1 + len(names), *batch.tokens.shape))


def statistics_of(objective: Objective) -> tuple[str, ...]:
    """Returns the names of the objective's metrics that are also computed in validation (entropy,
    mean_token_accuracy). Metrics of unlearning exist in training steps only."""
    return tuple(name for name in objective.metrics if name in METRICS)


def evaluate_objective(
    engine: Engine,
    dataset: SampleSet,
    num_samples: int,
    eod: int | None,
    look_for_stop: Callable[[], None] = lambda: None,
) -> tuple[float, dict[str, float]]:
    """Returns (loss, metrics by name) of the objective over the first `num_samples` samples, without
    gradients.

    The loss is computed as if all samples were one step. Losses that compare examples with each other (KTO's
    KL, aot) compare as many at a time as a training step has. look_for_stop: called before each chunk of
    micro-batches, by all ranks together; an exception that it raises ends the evaluation.
    """
    objective, groups = engine.objective, engine.groups
    batch_sums: list[Tensor] = []

    def read(head: HeadInput, batch: Batch) -> Tensor:
        parts, metrics = objective.loss_sum(head, batch, groups.group("tensor"))
        sums = torch.zeros(len(objective.metrics), 2, device=parts.device)
        objective.add_metrics(sums, metrics)
        return torch.cat([sums.flatten(), parts, objective.weight(batch)])

    def shape(batch: Batch) -> tuple[int]:
        return (2 * (len(objective.metrics) + len(objective.weight(batch))),)

    with eager_blocks(engine.stage):
        for chunk in _chunks(engine, dataset, num_samples, eod, look_for_stop):
            batch_sums += engine.forward_only(engine.complete(chunk), read, shape)
    total = groups.sum(torch.stack(batch_sums).double().sum(0), "data")
    sums, (parts, weights) = total[: 2 * len(objective.metrics)], total[2 * len(objective.metrics) :].view(2, -1)
    means = objective.means(sums.view(-1, 2))
    return float((parts / weights.clamp(min=1.0)).sum()), {name: float(value) for name, value in means.items()}


def validation_metrics(args: NeoXArgs, objective: Objective) -> list[str]:
    """Returns the names of the metrics that this run's validations log, such as `validation/lm_loss`."""
    metrics = objective.metrics if trains_preferences(args) else statistics_of(objective)
    perplexity = ("lm_loss_ppl", "unigram_entropy", *(("lm_loss_char_lvl_ppl",) if args.char_level_ppl else ()))
    names = (*(() if trains_preferences(args) else perplexity), *metrics, *objective.differences, *objective.validated)
    places = ["validation", *(f"validation/{name}" for name in valid_sets(args))]
    if args.ema_decay is not None:  # of the averaged weights
        places += [place.replace("validation", "validation/ema", 1) for place in places]
    return [f"{place}/{name}" for place in places for name in ("lm_loss", *names)]


def _chunks(
    engine: Engine, dataset: SampleSet, num_samples: int, eod: int | None, look_for_stop: Callable[[], None]
) -> Iterator[list[Batch]]:
    """Yields lists of this data rank's micro-batches, which together hold its share of the first
    `num_samples` samples.

    A list has as many micro-batches as a training step. `look_for_stop` is called before each list.
    """
    args, groups = engine.args, engine.groups
    rows, rank, size = args.train_micro_batch_size_per_gpu, groups.rank("data"), groups.size("data")
    batches = eval_batches(dataset, num_samples, rows, rank, size, collation(args, eod))
    while chunk := list(islice(batches, args.gradient_accumulation_steps or 1)):
        look_for_stop()
        yield chunk
