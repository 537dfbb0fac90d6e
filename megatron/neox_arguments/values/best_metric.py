"""Parses `save_best`: a validation metric, and whether its smallest or largest value is best."""

from typing import Literal

Mode = Literal["min", "max"]
PREFIXES = ("validation/", "eval_tasks/")
_LOWER_IS_BETTER = ("loss", "ppl", "perplexity", "bits_per_byte")
_HIGHER_IS_BETTER = (
    "rewards/accuracies", "rewards/margins", "rewards_norm/accuracies", "rewards_norm/margins", "token_accuracy",
    "_acc", "_acc_norm", "_acc_bytes", "_exact_match", "_f1", "_bleu", "_mcc", "_rouge1", "_rouge2", "_rougeL",
)  # fmt: skip


def best_metric(text: str) -> tuple[str, Mode]:
    """Parses `METRIC`, `METRIC:min` or `METRIC:max` into (metric, which value is best: "min" or "max").

    Raises ValueError if it is not a validation metric, or if it is unknown whether low or high is better.
    """
    name, colon, suffix = text.rpartition(":")
    if colon and suffix == "min":
        mode: Mode = "min"
    elif colon and suffix == "max":
        mode = "max"
    else:
        name = text
        if not name.endswith((*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER)):
            raise ValueError(f"{name}: it is unknown whether low or high is better; write {name}:min or {name}:max")
        mode = "min" if name.endswith(_LOWER_IS_BETTER) else "max"
    if not name.startswith(PREFIXES):
        raise ValueError(
            f"{name}: is not a validation metric; write a name as in metrics.jsonl, such as validation/lm_loss or "
            "eval_tasks/TASK_METRIC"
        )
    return name, mode
