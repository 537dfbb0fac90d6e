"""Plots the losses in a run's metrics.jsonl over the tokens seen, and summarises them in one sentence."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_SETS = "validation/*/lm_loss"  # the named sets of `valid_sets`
_ENTROPY = "validation/unigram_entropy"
# Colour and label of further metrics, drawn if a run logged them
EXTRA_CURVES = {
    "train/ga_actual_loss": ("tab:red", "loss to forget"),
    "train/gd_retain_loss": ("tab:green", "loss to retain"),
    "train/divergence": ("tab:purple", "divergence from the teacher"),
}


def ordinary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl without those of unlearning steps, whose loss is of another kind."""
    return [row for row in rows if not row.get("train/batch_type")]


def read_curve(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Returns (consumed tokens, values) of the metric `name`, one number for each row that has it."""
    chosen = [row for row in rows if name in row and "consumed_tokens" in row]
    return [row["consumed_tokens"] for row in chosen], [row[name] for row in chosen]


def unigram_entropy(rows: list[dict[str, Any]]) -> float | None:
    """Returns the last logged unigram entropy of the validation tokens, in nats; None if no row has it."""
    return next((row[_ENTROPY] for row in reversed(rows) if _ENTROPY in row), None)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plots the losses in rows of metrics.jsonl over the tokens seen, and writes the picture to `path`.

    Losses are in nats per token. A dashed line shows the unigram entropy of the validation tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(*read_curve(ordinary(rows), "train/lm_loss"), color="tab:blue", linewidth=1, label="training")
    axes.plot(*read_curve(rows, "validation/lm_loss"), color="tab:orange", marker="o", label="validation")
    for name in dict.fromkeys(name for row in rows for name in row if fnmatchcase(name, _SETS)):
        label = name.rpartition("/")[0].replace("/", " ", 1)  # such as `validation web`
        axes.plot(*read_curve(rows, name), marker=".", linewidth=1, label=label)
    for name, (color, label) in EXTRA_CURVES.items():
        if any(name in row for row in rows):
            axes.plot(*read_curve(rows, name), color=color, marker=".", linewidth=1, label=label)
    entropy = unigram_entropy(rows)
    if entropy is not None:
        axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy (validation)")
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns one sentence with the first and last validation loss, and the unigram entropy for
    comparison."""
    tokens, losses = read_curve(rows, "validation/lm_loss")
    text = "no validation loss was logged"
    if losses:
        text = f"validation loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token after {tokens[-1]:,.0f} tokens"
    entropy = unigram_entropy(rows)
    if losses and entropy is not None:
        text = f"{text} (unigram entropy {entropy:.3f})"
    for name, (_, label) in EXTRA_CURVES.items():
        if curve := read_curve(rows, name)[1]:
            text += f"; {label} {curve[0]:.3f} -> {curve[-1]:.3f}"
    return text
