"""Runs an evaluation: rank 0 runs lm-eval in a thread, and all ranks compute what lm-eval requests."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from megatron.distributed.rank0_driver import RunOperation, run_rank0_driver
from megatron.evaluation.model_operations import model_operations
from megatron.evaluation.progress import DESCRIPTION, EvaluationProgress
from megatron.evaluation.results import FEWSHOT_SEED, NUMPY_SEED, RANDOM_SEED, EvaluationResults, LoadedTasks
from megatron.model import Model
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.local_paths import with_home
from megatron.process import StopRequested, look_for_stop
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.evaluation.language_model import NeoXLM


def load_tasks_on_rank0(
    args: NeoXArgs,
    groups: ParallelGroups,
    tokenizer: Tokenizer,
    logger: logging.Logger,
    on_beat: Callable[[], None] = lambda: None,
) -> LoadedTasks | None:
    """Loads the tasks of `eval_tasks` on rank 0 and returns them on rank 0. Returns None on other ranks.

    All ranks call this function together, and wait for rank 0 without a time limit. Raises ConfigError on all
    ranks, for example for unknown tasks.

    on_beat: called on every rank for each message of rank 0, which sends one every few seconds when idle.
    """

    def work(call: RunOperation) -> LoadedTasks:
        from megatron.evaluation.task_loading import load_tasks, searched_folders, warn_of_broken

        logger.info(searched_folders(args))
        warn_of_broken(args, logger)
        with quiet(bars=sys.stderr.isatty()):
            return load_tasks(args, tokenizer, logger.warning)

    return run_rank0_driver(groups, work, {}, on_beat=on_beat)


def evaluate(
    model: Model,
    loaded_tasks: LoadedTasks | None,
    logger: logging.Logger,
    *,
    identity: str | None = None,
    bootstrap: int = 0,
    on_beat: Callable[[], None] = lambda: None,
) -> EvaluationResults | None:
    """Evaluates the model on the tasks that rank 0 loaded. Returns the results on rank 0, None on other
    ranks.

    All ranks call this function together. On all ranks it raises StopRequested after a stop signal (before
    the next task or chunk of requests), and, with `eval_failures: stop`, ConfigError for the first task that
    fails.

    loaded_tasks: the result of `load_tasks_on_rank0`.
    identity: a hash of the weights, by which `eval_cache` finds earlier answers; None: no cache.
    bootstrap: number of bootstrap resamples for standard errors; 0: no standard errors are computed.
    on_beat: called on every rank for each message of rank 0, which sends one every few seconds when idle.
    """

    def work(call: RunOperation) -> EvaluationResults:
        assert loaded_tasks is not None
        # The seeds of lm-eval. In training, `run.inference` restores the random states afterwards.
        random.seed(RANDOM_SEED)
        np.random.seed(NUMPY_SEED)
        logger.info(f"{DESCRIPTION} on {len(loaded_tasks.tasks)} tasks: {', '.join(loaded_tasks.tasks)}")
        with EvaluationProgress(logger) as progress, quiet():
            return _run(model, loaded_tasks, call, logger, progress, identity, bootstrap)

    return run_rank0_driver(model.groups, work, model_operations(model), on_beat=on_beat)


def _run(
    model: Model,
    loaded_tasks: LoadedTasks,
    call: RunOperation,
    logger: logging.Logger,
    progress: EvaluationProgress,
    identity: str | None,
    bootstrap: int,
) -> EvaluationResults:
    from megatron.evaluation.language_model import NeoXLM

    args = model.args
    evaluation = EvaluationResults(failures=dict(loaded_tasks.failures))
    for name, reason in evaluation.failures.items():
        _report(args, logger, name, reason)
    language_model = NeoXLM(model, call, progress, loaded_tasks.template)
    with _cached(language_model, args, identity) as cached_model:
        for name, tasks in loaded_tasks.tasks.items():
            look_for_stop()  # lm-eval makes all requests of a task at once
            try:
                evaluation.add(run_task(cached_model, tasks, loaded_tasks, args, bootstrap))
            except StopRequested:
                raise
            except Exception as problem:  # raised by the task's own code, or by the model for its requests
                evaluation.failures[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
                _report(args, logger, name, evaluation.failures[name])
    too_long, skipped = language_model.num_too_long, language_model.num_skipped
    if too_long:
        done = f"{skipped} of them were skipped" if skipped else "they were truncated on the left"
        logger.info(f"{too_long} requests were longer than the model's {model.positions} positions: {done}")
    evaluation.results["too_long"] = {"requests": too_long, "skipped": skipped}
    return evaluation


def run_task(
    language_model: Any, tasks: dict[str, Any], loaded_tasks: LoadedTasks, args: NeoXArgs, bootstrap: int
) -> dict[str, Any]:
    """Runs lm-eval's `evaluate` for one task, or for the tasks of one group, and returns lm-eval's results.

    `task_hashes` are added to the results. Unless `eval_log_samples` is set, the samples are removed.

    tasks: the task or group in the form that lm-eval's `evaluate` takes. bootstrap: number of resamples for
        standard errors.
    """
    import lm_eval

    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)  # so that a task chooses the same examples each time
    try:
        results = lm_eval.evaluate(
            language_model,
            tasks,
            limit=args.eval_limit,
            bootstrap_iters=bootstrap,
            log_samples=True,
            system_instruction=loaded_tasks.system_prompt,
            apply_chat_template=args.eval_apply_chat_template,
            fewshot_as_multiturn=args.eval_apply_chat_template,
            confirm_run_unsafe_code=args.eval_confirm_unsafe_code,
        )
    finally:
        for task in tasks["tasks"].values():
            task._instances = None  # frees requests and answers
    assert results is not None
    with_hashes: dict[str, Any] = {**results, "task_hashes": {}}
    for task, rows in results["samples"].items():  # as lm-eval's EvaluationTracker computes them
        joined = "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
        with_hashes["task_hashes"][task] = hashlib.sha256(joined.encode()).hexdigest()
    if not args.eval_log_samples:
        del with_hashes["samples"]
    return with_hashes


def _report(args: NeoXArgs, logger: logging.Logger, name: str, reason: str) -> None:
    if args.eval_failures == "stop":
        raise args.error(
            "eval_tasks", f"{name}: {reason} (eval_failures: stop; to go on without this task, set report)"
        )
    logger.warning(f"evaluation: task {name} is skipped: {reason}")


@contextmanager
def _cached(language_model: NeoXLM, args: NeoXArgs, identity: str | None) -> Iterator[Any]:
    """Yields `language_model`, wrapped in lm-eval's cache of answers if `eval_cache` and `identity` are set.

    The cache is a file in the folder `eval_cache`. Its name is a hash of the weights' identity, the
    precision, the maximum length, `eval_overlong` and the tokenizer.
    """
    if args.eval_cache is None or identity is None:
        yield language_model
        return
    from lm_eval.api.model import CachingLM

    length, tokenizer = language_model.max_length, language_model.tokenizer_name
    cache_key = (identity, args.params_dtype, args.eval_overlong, length, tokenizer)
    name = hashlib.sha256(repr(cache_key).encode()).hexdigest()[:16]
    folder = with_home(args.eval_cache)
    folder.mkdir(parents=True, exist_ok=True)
    cached = CachingLM(language_model, str(folder / f"{name}.db"))
    try:
        yield cached
    finally:
        cached.dbdict.close()


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Within the `with` block, silences lm-eval's log lines and progress bars, and keeps lm-eval from
    starting processes.

    lm-eval's bars would be drawn over the run's own bar and fill the log. Its processes would be forks of a
    process that uses a GPU.

    bars: True: progress bars that are created in the block are shown, such as those of downloads. Bars
        created before are shown in any case.
    """
    from lm_eval.api import metrics

    log, draw = logging.getLogger("lm_eval"), tqdm.__init__

    def hidden(bar: tqdm, *arguments: Any, **keywords: Any) -> None:
        draw(bar, *arguments, **{**keywords, "disable": True})

    multiprocessing = os.environ.get("DISABLE_MULTIPROC")
    with ExitStack() as restore:
        restore.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        if multiprocessing is None:
            restore.callback(os.environ.pop, "DISABLE_MULTIPROC")
        else:
            restore.callback(os.environ.__setitem__, "DISABLE_MULTIPROC", multiprocessing)
        os.environ["DISABLE_MULTIPROC"] = "1"
        restore.callback(delattr, metrics, "print")
        setattr(metrics, "print", lambda *arguments: None)  # noqa: B010 - "bootstrapping for stddev"
        if not bars:
            restore.callback(setattr, tqdm, "__init__", draw)
            setattr(tqdm, "__init__", hidden)  # noqa: B010 - of every library
        yield
