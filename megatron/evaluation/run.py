"""Runs eval.py: loads tasks and model, scores, and writes files, table and trackers."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.checkpointing.remote_staging import with_local_model
from megatron.distributed import Process, Watchdog, configure_logging, on_rank_zero, rendezvous_and_check
from megatron.distributed.rank0_driver import RunOperation, run_rank0_driver
from megatron.evaluation.harness import EvaluationResults, evaluate, load_tasks_on_rank0
from megatron.evaluation.results import TIME, output_folder, table, write
from megatron.generation import load_model
from megatron.model import Model
from megatron.mpu import init_model_parallel
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from megatron.evaluation.task_loading import LoadedTasks

_BOOTSTRAP = 10_000  # resamples, as GPT-NeoX
Track = Callable[[NeoXArgs, Mapping[str, float]], None]


def run_evaluation(args: NeoXArgs, process: Process, track: Track = lambda args, row: None) -> bool:
    """Evaluates the configuration's model on its tasks. Returns whether all tasks could be run. All ranks
    call it together.

    track: called on rank 0 with the configuration and {metric name: value}. Raises ConfigError,
        CheckpointError, TokenizerError.
    """
    logger = configure_logging(process.rank)
    args = args.check_evaluation().for_inference(process.world_size)
    watchdog = Watchdog(args, process.world_size, logger)
    store = rendezvous_and_check(args, process, logger)
    args = with_local_model(args)
    groups = init_model_parallel(args, process, logger, store)
    for note in args.startup_notes():
        logger.info(note)
    tokenizer = build_tokenizer(args)
    watchdog.now("loading the tasks")
    start_time, date = time.perf_counter(), time.time()
    beat = partial(watchdog.now, "evaluating")
    on_rank_zero(groups, lambda: output_folder(args))
    loaded_tasks = load_tasks_on_rank0(args, groups, tokenizer, logger, partial(watchdog.now, "loading the tasks"))
    on_rank_zero(groups, lambda: _need_any(args, loaded_tasks))
    watchdog.now("loading the model")
    if args.zero_stage == 3 and groups.size("data") > 1:
        logger.info("zero_optimization.stage 3: eval.py keeps the weights whole on every data-parallel rank")
    model = load_model(args, groups, tokenizer, logger)
    source = str(args.load or args.save)
    identity = on_rank_zero(groups, lambda: weights_identity(model)) if args.eval_cache is not None else None
    watchdog.now("evaluating")
    results = evaluate(model, loaded_tasks, logger, identity=identity, bootstrap=_BOOTSTRAP, on_beat=beat)
    seconds = time.perf_counter() - start_time

    def finish(call: RunOperation) -> None:
        assert loaded_tasks is not None and results is not None
        from megatron.evaluation.metadata import add_metadata, machine_info

        run_info: Any = {"source": source, "start_date": date, "seconds": seconds, "bootstrap": _BOOTSTRAP}
        add_metadata(model, loaded_tasks, results, machine_info(), **run_info)
        _finish(args, results, seconds, logger, track)

    run_rank0_driver(groups, finish, {}, on_beat=beat)
    complete = on_rank_zero(groups, lambda: results is not None and not results.failures)
    if args.eval_compare_hf:
        from megatron.evaluation.compare import compare

        def compared(call: RunOperation) -> None:
            assert loaded_tasks is not None and results is not None
            compare(model, loaded_tasks, results, logger)

        run_rank0_driver(groups, compared, {}, on_beat=beat)
    groups.barrier()
    watchdog.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return complete


def _need_any(args: NeoXArgs, loaded_tasks: LoadedTasks | None) -> None:
    """Raises ConfigError if none of the tasks could be loaded. Called before the model is loaded."""
    assert loaded_tasks is not None  # of rank 0
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
    adapters = [(fingerprint(Path(path)), factor) for path, factor in model.adapters]
    return hashlib.sha256(repr((base, adapters)).encode()).hexdigest() if adapters else base


def fingerprint(path: Path) -> str:
    """Returns a hash that identifies the weights in a folder.

    It is the hash of `manifest.json`, or, if there is none, of the names, sizes and modification times of all
    files.
    """
    manifest = path / "manifest.json"
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    return hashlib.sha256(repr((str(path.resolve()), facts)).encode()).hexdigest()
