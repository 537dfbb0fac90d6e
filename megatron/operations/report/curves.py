"""Chooses the metrics to plot, groups them into plots, and thins long curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from megatron.operations.report.run_data import Numbers, Run, Series

POINTS = 2000  # most points of a curve: more than a screen has columns
PAGE_POINTS = 120_000  # most points of all curves of a page together; a point takes 16 bytes
FEWEST = 200  # points that each curve may have even if the page then has more than PAGE_POINTS
MEANS = 8  # a thinned curve has so many points for each point of its mean curve
SCORES = 8  # most curves in one plot of scores


@dataclass(frozen=True)
class Group:
    """A group of metrics that share a plot.

    patterns: shell patterns that match the metrics' names.
    factors: by metric, the factor that converts logged values to `unit`; other metrics are unchanged.
    """

    title: str
    unit: str
    patterns: tuple[str, ...]
    factors: Mapping[str, float] | None = None


PERPLEXITY = "Perplexity"
GROUPS = (
    Group("Loss", "loss", ("*/lm_loss",)),
    Group(PERPLEXITY, "log scale", ("*/lm_loss_ppl", "*/lm_loss_char_lvl_ppl")),
    Group("Loss by source", "loss", ("train/loss_by_source/*",)),
    Group("Tokens by source", "share of trained tokens", ("train/share_by_source/*",)),
    Group("Forget and retain", "loss", ("*/ga_actual_loss", "*/gd_*_loss", "*/ga_objective")),
    Group("Rewards", "reward", ("*/rewards/chosen", "*/rewards/rejected", "*/rewards/margins",
                                "*/*_reward", "*/reward", "*/rewards/*/mean", "*/pos_values", "*/neg_values",
                                "*/margin")),
    Group("Prompts that teach nothing", "% of prompts", ("train/frac_reward_zero_std",),
          {"train/frac_reward_zero_std": 100.0}),
    Group("Length of answers", "tokens", ("train/completions/*_length",)),
    Group("Answers that did not end", "% of answers", ("train/completions/clipped_ratio",),
          {"train/completions/clipped_ratio": 100.0}),
    Group("Sampler and trainer", "nats per token", ("train/sampling/*",)),
    Group("Clipped ratios", "% of tokens or answers", ("train/clip_ratio/*",),
          {"train/clip_ratio/low_mean": 100.0, "train/clip_ratio/high_mean": 100.0}),
    Group("Time of a step", "%", ("train/time/*_share",),
          {f"train/time/{part}_share": 100.0 for part in ("sampling", "waiting", "judging", "training")}),
    Group("Preference accuracy", "share of pairs", ("*/rewards/accuracies", "*/accuracy")),
    Group("Rewards by average log-probability", "", ("*/rewards_norm/*",)),
    Group("Log-probabilities of answers", "nats", ("*/logps/*",)),
    Group("Logits of answers", "", ("*/logits/*",)),
    Group("Distillation", "nats per token", ("*/divergence", "*/nll")),
    Group("Scores", "score", ("eval_tasks/*",)),
    Group("Learning rate", "", ("train/learning_rate", "train/ga_lr_scaled")),
    Group("Gradient norm", "before clipping", ("train/grad_norm",)),
    Group("Load-balancing loss", "", ("train/moe_aux_loss",)),
    Group("Router z-loss", "", ("train/moe_z_loss",)),
    Group("Router entropy", "nats per token", ("train/moe_entropy",)),
    Group("Busiest expert", "tokens, 1 = mean", ("train/moe_max_load",)),
    Group("Experts without a token", "experts of all layers", ("train/moe_idle_experts",)),
    Group("Dropped choices", "% of choices", ("train/moe_dropped",), {"train/moe_dropped": 100.0}),
    Group("Tokens per second", "tokens/s", ("runtime/tokens_per_sec",)),
    Group("Utilisation", "%", ("runtime/*_flops_utilization", "device/utilization_*"),
          {"runtime/model_flops_utilization": 100.0, "runtime/hardware_flops_utilization": 100.0}),
    Group("Device memory", "GiB", ("device/memory_gib_*",)),
    Group("Power", "watts a device", ("device/power_watts_*",)),
)  # fmt: skip
# Not plotted: flags and counters (shown as events or facts), standard errors of scores, and a constant of the
# data.
_NOT_DRAWN = (
    "train/skipped_steps", "train/spikes", "train/batch_type", "train/on_policy", "train/ga_iterations",
    "train/ga_skip_rate", "eval_tasks/*_stderr", "*/unigram_entropy",
)  # fmt: skip
_KINDS = {"train": "training", "validation": "validation", "test": "test"}
_PLOTTED_PREFIXES = ("train/", "validation/", "test/")  # metrics outside the groups are plotted under their names
_SET_METRICS = ("lm_loss", "lm_loss_ppl", "lm_loss_char_lvl_ppl", "unigram_entropy", "entropy", "mean_token_accuracy")
_LABELS = {
    "lm_loss": "", "model_flops_utilization": "MFU", "hardware_flops_utilization": "HFU",
    "lm_loss_ppl": "perplexity", "lm_loss_char_lvl_ppl": "perplexity of characters", "learning_rate": "learning rate",
    "grad_norm": "gradient norm", "tokens_per_sec": "tokens/s", "moe_aux_loss": "load-balancing loss",
    "moe_z_loss": "router z-loss", "moe_entropy": "entropy", "moe_max_load": "busiest expert",
    "moe_idle_experts": "experts without a token", "moe_dropped": "dropped choices",
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One line of a plot: the finite values of a metric in one run, reduced to fewer points.

    run: index in the list of runs.
    iterations, tokens, values: `[points]`.
    num_finite: number of points before the reduction.
    not_finite: number of logged values that are NaN or infinite, and not drawn.
    mean: a smooth curve of means over equal intervals; None if no point was left out.
    """

    run: int
    label: str
    iterations: Numbers
    tokens: Numbers
    values: Numbers
    num_finite: int
    not_finite: int
    mean: Series | None = None


@dataclass(frozen=True)
class Plot:
    """One plot of the report: a title, the unit of its values, and its curves."""

    title: str
    unit: str
    curves: tuple[Curve, ...]


def plots_of(runs: Sequence[Run]) -> list[Plot]:
    """Returns the plots of a report on these runs.

    For one run, metrics of one group share a plot. For several runs, each metric has its own plot with one
    curve per run."""
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    chosen = [(group, part) for group in _groups(names) for part in _split(group[1], group[0], len(runs) > 1)]
    curves = sum(name in run.series for _, part in chosen for name in part for run in runs)
    points = min(POINTS, max(FEWEST, PAGE_POINTS // max(curves, 1)))
    plots = []
    for (group, group_names), part in chosen:
        title = _title(group, group_names, part, len(runs) > 1)
        factors = group.factors or {}
        plot_curves = [
            _curve(i, run.name if len(runs) > 1 else _label(name), run.series[name], factors.get(name, 1.0), points)
            for name in part for i, run in enumerate(runs) if name in run.series
        ]  # fmt: skip
        plot_curves = [curve for curve in plot_curves if len(curve.values)]
        if plot_curves:
            plots.append(Plot(title, group.unit, tuple(plot_curves)))
    return plots


def not_finite_only(runs: Sequence[Run]) -> list[str]:
    """Returns the names of metrics that have no finite value in any run, so that no plot shows them."""
    names = dict.fromkeys(name for run in runs for name in run.series if _is_drawn(name))
    return [
        name for name in names
        if not any(np.isfinite(run.series[name].values).any() for run in runs if name in run.series)
    ]  # fmt: skip


def thin(series: Series, points: int) -> Series:
    """Reduces a series to about `points` points without losing spikes.

    Divides it into `points` / 2 intervals of equal length, and keeps the lowest and highest value of each,
    and the first and last point. A shorter series is returned unchanged."""
    count = len(series.values)
    if count <= points:
        return series
    edges = np.linspace(0, count, max(points // 2, 1) + 1).astype(int)
    widths, values = np.diff(edges), series.values
    bucket = np.repeat(np.arange(len(widths)), widths)
    order = np.lexsort((values, bucket))  # within each stretch by value
    indices = np.unique(np.concatenate([[0, count - 1], order[edges[:-1]], order[edges[1:] - 1]]))
    return Series(series.iterations[indices], series.tokens[indices], values[indices])


def means(series: Series, points: int) -> Series:
    """Divides a series into `points` intervals of equal length, and returns the series of their means."""
    starts = np.linspace(0, len(series.values), points, endpoint=False).astype(int)
    widths = np.diff([*starts, len(series.values)])
    columns = (series.iterations, series.tokens, series.values)
    return Series(*(np.add.reduceat(column, starts) / widths for column in columns))


def _is_drawn(name: str) -> bool:
    return not any(fnmatchcase(name, pattern) for pattern in _NOT_DRAWN)


def _groups(names: Sequence[str]) -> list[tuple[Group, list[str]]]:
    """Returns (group, names of its metrics) for each group that has any, sorted from training to test.

    Training, validation and test metrics outside GROUPS follow, in groups by the name after the prefix."""
    grouped: list[tuple[Group, list[str]]] = [(group, []) for group in GROUPS]
    ungrouped: dict[str, list[str]] = {}
    for name in filter(_is_drawn, names):
        matching = (members for group, members in grouped if any(fnmatchcase(name, p) for p in group.patterns))
        if (members := next(matching, None)) is not None:
            members.append(name)
        elif name.startswith(_PLOTTED_PREFIXES):
            stem = (name.rpartition("/") if _is_of_set(name) else name.partition("/"))[2]  # one plot for all sets
            ungrouped.setdefault(stem, []).append(name)
    for stem, members in ungrouped.items():
        title = _LABELS.get(stem, _words(stem))
        grouped.append((Group(title[:1].upper() + title[1:], "", ()), members))
    return [(group, sorted(members, key=_kind)) for group, members in grouped if members]


def _split(names: list[str], group: Group, one_per_plot: bool) -> list[list[str]]:
    """Splits the metrics of a group into plots, and returns the names of each plot.

    one_per_plot: one plot per metric. Otherwise one plot for all; scores are split into plots of at most
    8."""
    width = 1 if one_per_plot else SCORES if group.title == "Scores" else len(names)
    return [names[i : i + width] for i in range(0, len(names), width)]


def _title(group: Group, names: Sequence[str], part: Sequence[str], one_per_plot: bool) -> str:
    if one_per_plot and (len(names) > 1 or not group.patterns):
        kind = part[0].partition("/")[0]
        return f"{group.title}: {_label(part[0]) if group.patterns else _KINDS.get(kind, kind)}"
    if len(part) < len(names):
        return f"{group.title}: {_label(part[0])} to {_label(part[-1])}"
    return group.title


def _label(name: str) -> str:
    """Returns the label of a metric in a legend, such as `validation perplexity`; "training" is omitted."""
    kind, _, stem = name.partition("/")
    if _is_of_set(name):
        named_set, _, stem = stem.rpartition("/")
        return f"{_KINDS[kind]} {named_set.replace('/', ' ')} {_LABELS.get(stem, _words(stem))}".strip()
    stem = _LABELS.get(stem, _words(stem))
    return f"{_KINDS[kind]} {stem}".strip() if kind in ("validation", "test") or not stem else stem


def _is_of_set(name: str) -> bool:
    """Returns whether a metric is of a named validation set (`valid_sets`)."""
    return fnmatchcase(name, "validation/*/*") and name.rpartition("/")[2] in _SET_METRICS


def _kind(name: str) -> int:
    """Returns the sort key of a metric: 0 for training, 1 for validation, 2 for test, 3 for all others."""
    kind = name.partition("/")[0]
    return list(_KINDS).index(kind) if kind in _KINDS else len(_KINDS)


def _words(stem: str) -> str:
    return stem.replace("/", " ").replace("_", " ")


def _curve(run: int, label: str, series: Series, factor: float, points: int) -> Curve:
    finite = np.isfinite(series.values)
    finite_series = Series(series.iterations[finite], series.tokens[finite], series.values[finite] * factor)
    thinned = thin(finite_series, points)
    missing = int(len(finite) - finite.sum())
    mean = means(finite_series, points // MEANS) if len(thinned.values) < len(finite_series.values) else None
    return Curve(
        run, label, thinned.iterations, thinned.tokens, thinned.values, len(finite_series.values), missing, mean
    )
