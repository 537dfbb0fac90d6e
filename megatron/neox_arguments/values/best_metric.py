"""What `save_best` names: a metric of the validation, and which of its values are better."""

from typing import Literal

Mode = Literal["min", "max"]
PREFIXES = ("validation/", "eval_tasks/")
_LOWER_IS_BETTER = ("loss", "ppl", "perplexity", "bits_per_byte")
_HIGHER_IS_BETTER = (
    "rewards/accuracies", "rewards/margins", "rewards_norm/accuracies", "rewards_norm/margins", "token_accuracy",
    "_acc", "_acc_norm", "_acc_bytes", "_exact_match", "_f1", "_bleu", "_mcc", "_rouge1", "_rouge2", "_rougeL",
)  # fmt: skip


def best_metric(text: str) -> tuple[str, Mode]:
    """(the metric, whether the smallest or the largest value is best) of `METRIC`, `METRIC:min` or
    `METRIC:max`.

    Raises ValueError for a name that is no metric of a validation, or does not say which values are better.
    """
    name, colon, suffix = text.rpartition(":")
    if colon and suffix == "min":
        mode: Mode = "min"
    elif colon and suffix == "max":
        mode = "max"
    else:
        name = text
        if not name.endswith((*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER)):
            raise ValueError(f"{name}: does not say whether less is better; write {name}:min or {name}:max")
        mode = "min" if name.endswith(_LOWER_IS_BETTER) else "max"
    if not name.startswith(PREFIXES):
        raise ValueError(
            f"{name}: is no metric of the validation; name one as metrics.jsonl does, as validation/lm_loss or "
            "eval_tasks/TASK_METRIC"
        )
    return name, mode
