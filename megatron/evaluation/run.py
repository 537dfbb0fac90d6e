"""Implements eval.py: loads tasks and model, evaluates, and writes result files, a table and tracker rows."""

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.adapters import is_adapter_checkpoint
from megatron.checkpointing.huggingface import export_hf, is_hf
from megatron.checkpointing.layout import is_tag, step_of
from megatron.distributed import Process, Watchdog, configure_logging, on_rank_zero, rendezvous_and_check
from megatron.distributed.rank0_driver import RunOperation, run_rank0_driver
from megatron.evaluation.harness import evaluate, load_tasks_on_rank0, quiet, run_task
from megatron.evaluation.results import TIME, EvaluationResults, LoadedTasks, add_metadata, output_folder, table, write
from megatron.generation.model import load_model, start_inference
from megatron.model import Model
from megatron.mpu import DTYPES
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs

_BOOTSTRAP = 10_000  # resamples, as GPT-NeoX
Track = Callable[[NeoXArgs, Mapping[str, float]], None]


def run_evaluation(args: NeoXArgs, process: Process, track: Track = lambda args, row: None) -> bool:
    """Evaluates the model of a configuration on `eval_tasks`. Returns whether all tasks could be run.

    All ranks call this function together. Raises ConfigError, CheckpointError, TokenizerError.

    track: called on rank 0 with the configuration and {metric name: value}.
    """
    logger = configure_logging(process.rank)
    args = args.check_evaluation().for_inference(process.world_size)
    watchdog = Watchdog(args, process.world_size, logger)
    store = rendezvous_and_check(args, process, logger)
    args, groups, tokenizer = start_inference(args, process, logger, store)
    watchdog.now("loading the tasks")
    start_time, date = time.perf_counter(), time.time()
    beat = partial(watchdog.now, "evaluating")
    on_rank_zero(groups, lambda: output_folder(args))
    loaded_tasks = load_tasks_on_rank0(args, groups, tokenizer, logger, partial(watchdog.now, "loading the tasks"))
    on_rank_zero(groups, lambda: _need_any(args, loaded_tasks))
    watchdog.now("loading the model")
    if args.zero_stage == 3 and groups.size("data") > 1:
        logger.info(
            "zero_optimization.stage 3: eval.py does not shard the weights: every data-parallel rank holds a full copy"
        )
    model = load_model(args, groups, tokenizer, logger)
    source = str(args.load or args.save)
    identity = on_rank_zero(groups, lambda: weights_identity(model)) if args.eval_cache is not None else None
    watchdog.now("evaluating")
    results = evaluate(model, loaded_tasks, logger, identity=identity, bootstrap=_BOOTSTRAP, on_beat=beat)
    seconds = time.perf_counter() - start_time

    def finish(call: RunOperation) -> None:
        assert loaded_tasks is not None and results is not None
        iteration = step_of(model.source) if is_tag(Path(model.source).name) else None
        add_metadata(
            model, loaded_tasks, results, source=source, iteration=iteration, start_date=date, seconds=seconds,
            bootstrap=_BOOTSTRAP,
        )  # fmt: skip
        _finish(args, results, seconds, logger, track)
        if args.eval_compare_hf:
            _compare(model, loaded_tasks, results, logger)

    run_rank0_driver(groups, finish, {}, on_beat=beat)
    complete = on_rank_zero(groups, lambda: results is not None and not results.failures)
    groups.barrier()
    watchdog.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return complete


def _need_any(args: ModelArgs, loaded_tasks: LoadedTasks | None) -> None:
    """Raises ConfigError if no task could be loaded. It is called before the model is loaded, to fail
    early."""
    assert loaded_tasks is not None  # on rank 0
    if not loaded_tasks.tasks:
        place = f"{args.origin('eval_tasks')}: eval_tasks"
        raise ConfigError([f"{place}: {name}: {reason}" for name, reason in loaded_tasks.failures.items()])


def _finish(args: NeoXArgs, results: EvaluationResults, seconds: float, logger: logging.Logger, track: Track) -> None:
    path = write(args, results, time.strftime(TIME))
    for line in table(results):
        logger.info(line)
    track(args, {f"eval/{name}": value for name, value in results.metrics().items()})
    for name, reason in results.failures.items():
        logger.warning(f"task {name} has no scores: {reason}")
    logger.info(f"results are in {path}, after {seconds:.1f} s")


def weights_identity(model: Model) -> str:
    """Returns a hash that identifies a model's weights and the adapters merged into them."""
    base = fingerprint(Path(model.source))
    base += ", averaged" if model.args.load_ema else ""
    adapters = [(fingerprint(Path(path)), factor) for path, factor in model.adapters]
    return hashlib.sha256(repr((base, adapters)).encode()).hexdigest() if adapters else base


def fingerprint(path: Path) -> str:
    """Returns a hash that identifies the weights in a folder.

    It is the hash of the folder's `manifest.json`. If there is no such file, it is a hash of the names, sizes
    and modification times of all files.
    """
    manifest = path / "manifest.json"
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    return hashlib.sha256(repr((str(path.resolve()), facts)).encode()).hexdigest()


# -- --compare-hf --------------------------------------------------------------------------------------------


def _compare(model: Model, loaded_tasks: LoadedTasks, neox_results: EvaluationResults, logger: logging.Logger) -> None:
    """Runs the tasks through lm-eval's hf backend too, and logs both values of every metric and their
    difference.

    Differences are relative for values above 1. A checkpoint is first exported to a temporary HuggingFace
    folder. Only rank 0 calls this function. Raises CheckpointError for a model that fits no HuggingFace
    architecture.
    """
    hf_results = EvaluationResults()
    start_time = time.perf_counter()
    logger.info("running the same tasks through lm-eval's hf backend (--compare-hf)")
    with _hf_folder(model) as folder, quiet():
        language_model = _hf_language_model(folder, model)
        for name, tasks in loaded_tasks.tasks.items():
            if name not in neox_results.failures:
                hf_results.add(run_task(language_model, tasks, loaded_tasks, model.args, 0))
    largest, neox_metrics = 0.0, neox_results.metrics()
    logger.info(f"{'metric':<50} {'ours':>14} {'hf backend':>14} {'difference':>12}")
    for name, value in hf_results.metrics().items():
        if name in neox_metrics:
            difference = abs(neox_metrics[name] - value) / max(1.0, abs(value))
            largest = max(largest, difference)
            logger.info(f"{name:<50} {neox_metrics[name]:>14.6f} {value:>14.6f} {difference:>12.2e}")
    seconds = time.perf_counter() - start_time
    logger.info(f"largest difference to lm-eval's hf backend: {largest:.2e} (the comparison took {seconds:.1f} s)")


@contextmanager
def _hf_folder(model: Model) -> Iterator[Path]:
    """Yields the HuggingFace folder of the evaluated model. A checkpoint is exported to a temporary folder
    first."""
    source = Path(model.source)
    if model.adapters or not is_hf(source) and is_adapter_checkpoint(source):
        raise CheckpointError(
            f"{source}: has adapters; for --compare-hf, merge them into the weights first: tools/ckpts/adapter.py merge"
        )
    if is_hf(source):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="compare-hf-") as temporary:
        export_hf(source, model.args, Path(temporary) / "model", check=False, averaged=model.args.load_ema)
        yield Path(temporary) / "model"


def _hf_language_model(folder: Path, model: Model) -> Any:
    import transformers
    from lm_eval.models.huggingface import HFLM

    # The model is built here, because the backend would take the ranks of this run for ranks of its own.
    hf_model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[model.args.params_dtype])
    size = model.args.eval_batch_size
    return HFLM(
        pretrained=hf_model.to(model.groups.device), tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        batch_size=1 if size == "auto" else size, max_length=model.positions,
    )  # fmt: skip
