"""Adds facts of the training run to the model card (README.md) of a published checkpoint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.neox_arguments import NeoXArgs

CARD, CURVES, CONFIG = "README.md", "curves.png", "training_config.json"
_BEGIN = "\n<!-- of the run -->\n"  # a card's text below this line is replaced when facts are written again
_ESSENTIAL = (
    "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "pos_emb", "norm", "activation",
    "tokenizer_type", "precision", "train_impl", "train_batch_size", "train_iters", "optimizer_type", "lr", "min_lr",
    "lr_decay_style", "warmup", "weight_decay", "gradient_clipping", "seed",
)  # fmt: skip
_SCORES = "eval_tasks/"


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that its model card shows.

    step: the checkpoint's step. args: the run's configuration. tokens: number of tokens trained up to `step`.
    data: the entry `data` of the checkpoint's manifest.json (digests of data files); {} without a manifest.
    rows: rows of metrics.jsonl up to `step`.
    scores: scores of an evaluation of the published model, by name.
    has_curves: whether the folder has curves.png.
    """

    step: int
    args: NeoXArgs
    tokens: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    has_curves: bool = False


def write_card(folder: Path, facts: RunFacts) -> None:
    """Adds the facts of a run to README.md in the folder of a converted model, in place of earlier facts.

    A folder without README.md, as of LoRA adapters, gets a new one.
    """
    from huggingface_hub import ModelCard

    path = folder / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else "---\nlibrary_name: peft\n---\n\n# Adapters\n"
    card = ModelCard(text.partition(_BEGIN)[0] + _sections(facts), ignore_metadata_errors=True)
    base = base_model(facts.args)
    if base is not None:
        card.data["base_model"] = base
    scores = {**_run_scores(facts), **facts.scores}
    if scores:
        card.data["model_name"] = card.data.get("model_name") or folder.name
        card.data["eval_results"] = [_result(name, value) for name, value in scores.items() if "stderr" not in name]
    path.write_text(str(card), encoding="utf-8")


def base_model(args: NeoXArgs) -> str | None:
    """Returns the Hub name of the model that a run started from (`load: hf://NAME`); None for any other
    `load`."""
    return args.load.removeprefix("hf://").partition("@")[0] if args.load and args.load.startswith("hf://") else None


def draw_curves(folder: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Plots the losses in rows of metrics.jsonl to curves.png in `folder`.

    Returns False, and writes nothing, if no row has `train/lm_loss`.
    """
    from megatron.operations.loss_plot import plot

    if not any("train/lm_loss" in row for row in rows):
        return False
    plot([dict(row) for row in rows], folder / CURVES)
    return True


def _sections(facts: RunFacts) -> str:
    values = {key: getattr(facts.args, key, None) for key in _ESSENTIAL}
    parts = [_BEGIN, "## Training", _table(("key", "value"), [(k, v) for k, v in values.items() if v is not None])]
    if facts.tokens is not None:
        parts.append(f"Step {facts.step:,}, {facts.tokens:,} tokens seen.")
    parts.append(f"All keys of the configuration are in `{CONFIG}`.")
    if facts.data:
        data = json.dumps(facts.data, indent=1, sort_keys=True, default=str)
        parts += [
            "## Data",
            "Digests of the data files and of the order of their samples, from the checkpoint's manifest:",
        ]
        parts.append(f"<details><summary>data</summary>\n\n```json\n{data}\n```\n\n</details>")
    scores = {**_run_scores(facts), **facts.scores}
    if scores:
        parts += ["## Scores", _table(("score", "value"), [(name, f"{value:.6g}") for name, value in scores.items()])]
    if facts.has_curves:
        parts += ["## Curves", f"![losses over the tokens seen]({CURVES})"]
    return "\n\n".join(part.strip("\n") if part != _BEGIN else part.rstrip("\n") for part in parts) + "\n"


def _run_scores(facts: RunFacts) -> dict[str, float]:
    """Returns the `eval_tasks` scores and validation losses that the run logged at the checkpoint's step.

    Those of averages (`ema_decay`) are left out: the published weights are the last ones."""
    logged: dict[str, float] = {}
    for row in facts.rows:
        if row.get("iteration") == facts.step:
            logged |= {name.removeprefix(_SCORES): v for name, v in row.items() if name.startswith(_SCORES)}
            logged |= {name: v for name, v in row.items() if name.startswith("validation/")}
            if facts.args.ema_decay is not None:
                logged = {name: v for name, v in logged.items() if not name.startswith("validation/ema/")}
    return {name: value for name, value in logged.items() if isinstance(value, int | float)}


def _result(name: str, value: float) -> Any:
    from huggingface_hub import EvalResult

    task, _, metric = name.rpartition("_" if "/" not in name else "/")
    return EvalResult(
        task_type="text-generation", dataset_type=task or name, dataset_name=task or name,
        metric_type=metric or name, metric_value=value,
    )  # fmt: skip


def _table(head: tuple[str, str], rows: Sequence[tuple[str, Any]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)
