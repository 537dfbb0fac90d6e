"""Builds a run, in order and once: groups, tokenizer, datasets, model, engine, then loads a checkpoint."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron.checkpointing import Manifest, seed_generators
from megatron.data import (
    DataError,
    DataState,
    build_datasets,
    check_curriculum,
    data_fingerprint,
    data_log_lines,
    data_stamps,
    epoch_iterations,
    order_keys,
)
from megatron.distributed import (
    Process,
    Watchdog,
    check_transport,
    configure_logging,
    on_rank_zero,
    rendezvous_and_check,
    run_on_all_ranks,
    run_on_each_rank,
)
from megatron.model import build_stage, lowest_trained, trained_parameters
from megatron.mpu import ParallelGroups, init_model_parallel, settle_context
from megatron.neox_arguments import ModelArgs, MutableNeoXArgs, NeoXArgs, arguments_dump
from megatron.neox_arguments.frozen import FrozenDict
from megatron.neox_arguments.validation.experts import router_notes
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.process.terminal import for_log_file, for_terminal, terminal_log
from megatron.tokenizer import Tokenizer, build_tokenizer, describe, with_masked_ids
from megatron.training.builtin_callbacks.best_model import check_best
from megatron.training.builtin_callbacks.build import load_callbacks
from megatron.training.builtin_callbacks.profiling import record_memory_history
from megatron.training.checkpoint.local_saves import LocalSaves
from megatron.training.checkpoint.resume import CheckpointLoader
from megatron.training.checkpoint.run_parts import RunParts
from megatron.training.checkpoint.same_run import begun_of, continued, restarts_data
from megatron.training.checkpoint.source import (
    CheckpointSource,
    adopt_vocabulary,
    choose_source,
    fetch_remote_source,
    real_rows,
)
from megatron.training.checkpoint.writer import CheckpointWriter, lock_save
from megatron.training.compile_blocks import resolve_compile
from megatron.training.engine import Engine
from megatron.training.engine_choice import choose_engine
from megatron.training.method import Method, build_objective, find_method
from megatron.training.native.update_keys import resolve_update_keys
from megatron.training.out_of_memory import explained
from megatron.training.parallelize import parallelize
from megatron.training.precision_policy import recorded_precision
from megatron.training.reference.model import resume_with_reference
from megatron.training.run import Training
from megatron.training.schedules import build_schedule

# The values that `deterministic_mode` accepts of each environment variable; the first one is the default.
# NCCL's other algorithms sum in an order that depends on timing.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def _backward_reach(args: ModelArgs) -> str:
    lowest = lowest_trained(args)
    if lowest > 0:
        return f"layers below {lowest} have no backward pass"
    if args.no_weight_tying or not (args.trainable and args.trainable["head"]):
        return "all layers have a backward pass, down to the embedding"
    return (
        "the head shares the embedding's weight, so all layers have a backward pass; to avoid that, set "
        "trainable.embedding_gradient: false"
    )


def build_engine(
    args: NeoXArgs, groups: ParallelGroups, logger: logging.Logger | None = None, engine: type[Engine] | None = None
) -> Engine:
    """Returns an engine that holds a freshly initialised model.

    args: with the world size and the vocabulary resolved. engine: the engine's class; None: `choose_engine`
    chooses it.
    """
    if engine is None:
        engine = choose_engine(args).load()
    say: Callable[[str], None] = logger.info if logger is not None else lambda line: None
    args = resolve_compile(args, groups.device, engine.name, say)
    args = resolve_update_keys(args, groups, engine.name, say)
    stage = build_stage(args, groups, log=say)
    notes = [f"trainable: {_backward_reach(args)}"] if args.trainable is not None else []
    for note in [*engine.notes(args), *notes]:
        say(note)
    return parallelize(stage, build_objective(args), args, groups, engine, say)


def make_deterministic(args: NeoXArgs, say: Callable[[str], None]) -> None:
    """If `deterministic_mode` is set, make torch and its libraries use deterministic algorithms.

    Runs then give the same bits every time. Call it before torch uses a GPU. An operation without a
    deterministic version then raises where it is used. `attention_backend: auto` never chooses a kernel that
    is not deterministic, and naming one is an error.
    Raises ConfigError if an environment variable selects an algorithm that is not deterministic.
    """
    if not args.deterministic_mode:
        return
    for name, values in _DETERMINISTIC.items():
        if os.environ.setdefault(name, values[0]) not in values:
            wrong = f"the environment variable {name}={os.environ[name]} is not deterministic"
            raise args.error("deterministic_mode", f"{wrong}; unset it, or set it to one of {', '.join(values)}")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    variables = ", ".join(f"{name}={os.environ[name]}" for name in _DETERMINISTIC)
    say(f"deterministic_mode: torch.use_deterministic_algorithms(True), cuDNN without benchmarking, {variables}")


def _on_writers(args: NeoXArgs, groups: ParallelGroups, process: Process) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that runs its argument on rank 0 while other ranks wait, and gives all the result.

    Datasets write their index maps with it. If `use_shared_fs` is false, the first rank of every machine runs
    the function.

    Raises DataError if `use_shared_fs` is false and machines hold different data.
    """
    if args.use_shared_fs:
        return lambda work: on_rank_zero(groups, work)
    is_writer = process.local_rank == 0
    fingerprints = run_on_all_ranks(groups, lambda: data_fingerprint(args) if is_writer else None)
    for rank, data in enumerate(fingerprints):
        if data is not None and data != fingerprints[0]:
            raise DataError(
                f"use_shared_fs: false: the data on rank {rank}'s machine differs from rank 0's; copy the files"
            )

    def write(work: Callable[[], Any]) -> Any:
        results: list[Any] = []
        run_on_all_ranks(groups, lambda: results.append(work()) if is_writer else None)
        return on_rank_zero(groups, lambda: results[0])

    return write


def _with_iterations(args: NeoXArgs, steps: int, key: str) -> NeoXArgs:
    """Returns the configuration with `train_iters` set to `steps`, and its schedule checked again.

    key: the key from which `steps` was computed (`train_epochs` or `train_iters`), for messages.
    """
    place = args.origin(key)
    overrides: dict[str, Any] = {}
    if key == "train_epochs" and args.lr_decay_iters is None and (args.warmup_iters or 0) > steps:
        overrides["lr_decay_iters"] = args.warmup_iters  # the run ends during warm-up, as in other frameworks
    args = args.replace(train_epochs=None, train_iters=steps, **overrides)
    return replace(args, origins=FrozenDict({**args.origins, key: place, "train_iters": place}))


def _log_configuration(args: NeoXArgs, tokenizer: Tokenizer, logger: logging.Logger) -> None:
    """Log where the run saves, the resolved configuration, the vocabulary and notes on single keys.

    `save` comes first, in quotes: scripts written for GPT-NeoX take a run's name from the first quoted path
    in the log, which must not be the path of `load`.
    """
    if args.save is not None:
        logger.info(f'checkpoints: "{args.save}"')
    if log_file := terminal_log():
        logger.info(for_terminal(f"arguments, and a long line for each logged step: {log_file}"))
    logger.info(for_log_file(arguments_dump(args)))
    logger.info(describe(tokenizer, args.padded_vocab_size))
    if args.softmax_rows is not None:
        logger.info(
            f"mask_padded_vocab: the softmax uses {args.softmax_rows} of the vocabulary's {args.padded_vocab_size} rows"
        )
    for note in (*args.startup_notes(), *router_notes(args)):
        logger.info(note)


def _with_kernels_and_vocabulary(
    user_args: NeoXArgs,
    method: Method,
    tokenizer: Tokenizer,
    source: CheckpointSource,
    manifest: Manifest | None,
    groups: ParallelGroups,
    engine_name: str,
    say: Callable[[str], None],
) -> NeoXArgs:
    """Returns the configuration with `compile`, a resumed run's FP8 recipe and the vocabulary size resolved.

    They depend on the device, the checkpoint and the tokenizer. manifest: of the resumed run; None for a new
    one.
    """
    args = resolve_compile(user_args, groups.device, engine_name, say)
    if manifest is not None:  # after `compile` is resolved, so that it is chosen as at the run's first start
        args = recorded_precision(args, manifest.config.get("precision_fp8"), say)
    args = adopt_vocabulary(with_masked_ids(args, tokenizer), source, tokenizer.vocab_size)
    real = on_rank_zero(groups, lambda: real_rows(source, tokenizer.vocab_size))
    args = method.with_vocabulary(args, tokenizer, groups, real)
    trained_parameters(args)  # raises for a pattern without a match, before anything is read
    return args


def with_length(
    model_args: NeoXArgs, method: Method, groups: ParallelGroups, data_state: DataState, say: Callable[[str], None]
) -> NeoXArgs:
    """Returns the configuration with `train_iters` set to the number of optimizer steps of the run.

    data_state: position in the data, from which `train_epochs` is converted to iterations.
    """
    args, epochs = model_args, model_args.train_epochs
    if epochs is not None:
        steps = on_rank_zero(groups, lambda: epoch_iterations(model_args, model_args.train_batch_size, data_state))
        args = _with_iterations(args, steps, "train_epochs")
        say(f"train_epochs: {epochs} passes over the data are {args.train_iters} iterations")
        if args.warmup_iters is not None and args.warmup_iters > args.train_iters:
            say(
                f"warmup_iters: {args.cite('warmup_iters')} is more than the run's iterations, so the learning rate "
                f"only reaches {args.train_iters / args.warmup_iters:.2g} of lr at the end; set a smaller warmup_iters"
            )
    steps = method.num_steps(args, args.train_iters, say)
    return args if steps == args.train_iters else _with_iterations(args, steps, "train_iters")


def start(
    configuration: NeoXArgs | MutableNeoXArgs,
    process: Process,
    engine: type[Engine] | None = None,
    laid_out: DataState | None = None,
) -> Training:
    """Returns a run that is ready for its first step. Every rank calls it.

    engine: the engine's class; None: `choose_engine` chooses it.
    laid_out: the position in the data for which sets are built; None: that of the checkpoint it resumes.

    The configuration is resolved in this order: `user_args`, as the user wrote it, for this number of ranks;
    `model_args`, with kernels and vocabulary; `run_args`, with the number of steps; `args`, with the FP8
    recipe.
    """
    logger = configure_logging(process.rank)
    user_args = configuration.frozen().check_training().for_world(process.world_size)
    user_values = user_args.public_values
    if engine is None and user_args.engine != "auto":  # `auto` may take the checkpoint's, which is read later
        engine = choose_engine(user_args).load()
    if engine is not None:
        engine.check(user_args)
    check_curriculum(user_args)
    make_deterministic(user_args, logger.info)
    watchdog = Watchdog(user_args, process.world_size, logger)
    shared_folder = None if is_remote(user_args.save) else user_args.save
    store = rendezvous_and_check(user_args, process, logger, shared=shared_folder)
    fetch_remote_source(user_args)
    user_args = settle_context(user_args, process, logger.info)
    groups = init_model_parallel(user_args, process, logger, store)
    check_transport(user_args, groups, process, logger)
    user_callbacks = run_on_each_rank(groups, lambda: load_callbacks(user_args))
    if user_args.params_dtype == "fp16" and groups.device.type == "cpu":
        logger.info("precision: fp16 is slow on CPUs; --set precision=bfloat16 fp16=null is faster there")
    tokenizer, method = build_tokenizer(user_args), find_method(user_args)
    lock = lock_save(user_args, groups)
    source = on_rank_zero(groups, lambda: choose_source(user_args))
    local = LocalSaves(user_args, groups, logger) if user_args.local_save is not None else None
    source = source if local is None else local.newest(source)
    manifest = on_rank_zero(groups, lambda: continued(user_args, source))
    if engine is None:
        recorded = manifest.engine if manifest is not None else None
        choice = choose_engine(user_args, recorded)
        engine = choice.load()
        engine.check(user_args)
        logger.info(f"engine: {choice.name} ({choice.reason})")
    model_args = _with_kernels_and_vocabulary(
        user_args, method, tokenizer, source, manifest, groups, engine.name, logger.info
    )
    watchdog.now("reading the data")
    data_state = laid_out or begun_of(manifest, method, restarts_data(user_args, source.goes_on))
    epochs = model_args.train_epochs
    on_writers = _on_writers(model_args, groups, process)
    run_args = with_length(model_args, method, groups, data_state, logger.info)
    _log_configuration(run_args, tokenizer, logger)
    for line in on_rank_zero(groups, lambda: data_log_lines(run_args)):
        logger.info(line)
    # Each rank opens the sets by itself, which a stop signal to one rank ends on all
    datasets = run_on_each_rank(
        groups,
        lambda: build_datasets(
            run_args, train_batch_size=run_args.train_batch_size, on_one_rank=on_writers, epochs=epochs,
            data_state=data_state,
        ),
    )  # fmt: skip
    datasets = method.wrap_datasets(run_args, datasets, tokenizer.eod)
    for line in datasets.log_lines:
        logger.info(line)
    record_memory_history(run_args, groups)
    watchdog.now("building the model")
    try:
        built = build_engine(run_args, groups, logger, engine)
    except RuntimeError as problem:
        raise explained(problem, run_args, groups.world_rank, groups.device, watchdog.activity) from problem
    args = built.args
    check_best(args, built.objective, datasets)
    schedule = build_schedule(args)
    scaling = f" (lr_scaling: {args.lr_scaling}, {args.data_parallel_size} data-parallel ranks)"
    logger.info(schedule.describe() + (scaling if args.lr_scaling != "none" else ""))
    # Stamps come first: a file that changes after its fingerprint was taken has another stamp from then on
    stamps, files = on_rank_zero(groups, lambda: (data_stamps(args), data_fingerprint(args)))
    order = order_keys(args, epochs)
    values = args.public_values
    keys = {**user_values, **values}
    settled = {key: user_values.get(key) for key in keys if values.get(key) != user_values.get(key)}
    parts = RunParts(
        args, method, groups, built, schedule, tokenizer, datasets, files, stamps, order, source, settled, logger
    )  # fmt: skip
    writer = CheckpointWriter(parts, lock)
    seed_generators(args.seed, groups.device)
    watchdog.now("loading a checkpoint")
    loader = CheckpointLoader(parts, local)
    datasets, progress = resume_with_reference(loader, method, watchdog)
    writer.go_on_from(loader.origin)
    datasets = method.finish_datasets(parts, datasets, watchdog)
    return Training(
        args, method, groups, tokenizer, datasets, built, loader.origin.schedule, writer, progress, logger, watchdog,
        user_callbacks, loader.origin.zero_tokens, local,
    )  # fmt: skip
