"""`--compare-hf` runs the same tasks through lm-eval's own `hf` backend and compares the scores."""

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.adapters import is_adapter_checkpoint
from megatron.checkpointing.huggingface import export_hf, is_hf
from megatron.evaluation.harness import EvaluationResults, run_task
from megatron.evaluation.quiet import quiet
from megatron.evaluation.task_loading import LoadedTasks
from megatron.model import Model
from megatron.mpu import DTYPES


def compare(model: Model, loaded_tasks: LoadedTasks, neox_results: EvaluationResults, logger: logging.Logger) -> float:
    """Runs the tasks through lm-eval's hf backend too. Logs both scores of every metric and their difference.

    Returns the largest difference. Differences are relative for values above 1. Only rank 0 calls it.

    A checkpoint is exported to a temporary folder first. Raises CheckpointError for a model that no family of
    HuggingFace has.
    """
    hf_results = EvaluationResults()
    start_time = time.perf_counter()
    logger.info("the same tasks through lm-eval's hf backend")
    with _folder(model) as folder, quiet():
        language_model = _hf_language_model(folder, model)
        for tasks in (tasks for name, tasks in loaded_tasks.tasks.items() if name not in neox_results.failures):
            hf_results.add(run_task(language_model, tasks, loaded_tasks, model.args, 0))
    largest = 0.0
    neox_metrics, hf_metrics = neox_results.metrics(), hf_results.metrics()
    lines = [f"{'metric':<50} {'ours':>14} {'hf backend':>14} {'difference':>12}"]
    for name in hf_metrics:
        if name not in neox_metrics:
            continue
        difference = abs(neox_metrics[name] - hf_metrics[name]) / max(1.0, abs(hf_metrics[name]))
        largest = max(largest, difference)
        lines.append(f"{name:<50} {neox_metrics[name]:>14.6f} {hf_metrics[name]:>14.6f} {difference:>12.2e}")
    for line in lines:
        logger.info(line)
    seconds = time.perf_counter() - start_time
    logger.info(f"largest difference to lm-eval's hf backend: {largest:.2e} (it took {seconds:.1f} s)")
    return largest


@contextmanager
def _folder(model: Model) -> Iterator[Path]:
    """Yields the folder of the HuggingFace model that is evaluated; exports a checkpoint first."""
    source = Path(model.source)
    if model.adapters or not is_hf(source) and is_adapter_checkpoint(source):
        raise CheckpointError(f"{source}: has adapters; for --compare-hf merge them first, by tools/ckpts/adapter.py")
    if is_hf(source):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="compare-hf-") as temporary:
        export_hf(source, model.args, Path(temporary) / "model", check=False)
        yield Path(temporary) / "model"


def _hf_language_model(folder: Path, model: Model) -> Any:
    import transformers
    from lm_eval.models.huggingface import HFLM

    # Built here: the backend itself would take the ranks of this run for its own.
    hf_model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[model.args.params_dtype])
    size = model.args.eval_batch_size
    return HFLM(
        pretrained=hf_model.to(model.groups.device), tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        batch_size=1 if size == "auto" else size, max_length=model.positions,
    )  # fmt: skip
