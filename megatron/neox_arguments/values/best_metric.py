"""What `save_best` names: a metric of the validation, and which of its values are better."""

from typing import Literal

Mode = Literal["min", "max"]
PREFIXES = ("validation/", "eval_tasks/")
_LOWER = ("loss", "ppl", "perplexity", "bits_per_byte")
_HIGHER = (
    "rewards/accuracies", "rewards/margins", "rewards_norm/accuracies", "rewards_norm/margins", "token_accuracy",
    "_acc", "_acc_norm", "_acc_bytes", "_exact_match", "_f1", "_bleu", "_mcc", "_rouge1", "_rouge2", "_rougeL",
)  # fmt: skip


def best_metric(text: str) -> tuple[str, Mode]:
    """The metric and its better values of `METRIC`, `METRIC:min` or `METRIC:max`. Raises ValueError."""
    name, colon, told = text.rpartition(":")
    if colon and told == "min":
        mode: Mode = "min"
    elif colon and told == "max":
        mode = "max"
    else:
        name = text
        if not name.endswith((*_LOWER, *_HIGHER)):
            raise ValueError(f"{name}: does not say whether less is better; write {name}:min or {name}:max")
        mode = "min" if name.endswith(_LOWER) else "max"
    if not name.startswith(PREFIXES):
        raise ValueError(
            f"{name}: is no metric of the validation; name one as metrics.jsonl does, as validation/lm_loss or "
            "eval_tasks/TASK_METRIC"
        )
    return name, mode
