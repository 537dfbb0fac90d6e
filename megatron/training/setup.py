"""Building a run, in order and once: groups, tokenizer, datasets, model, engine, then a checkpoint if there
is one."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron.checkpointing import seed_generators
from megatron.data import (
    DataError,
    build_datasets,
    check_curriculum,
    data_fingerprint,
    data_log_lines,
    epoch_iterations,
    order_keys,
    with_sequences,
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
from megatron.model import (
    Stage,
    build_stage,
    lowest_trained,
    trained_parameters,
)
from megatron.mpu import ParallelGroups, init_model_parallel
from megatron.neox_arguments import MutableNeoXArgs, NeoXArgs, arguments_dump
from megatron.neox_arguments.frozen import FrozenDict
from megatron.neox_arguments.validation.experts import router_notes
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.neox_arguments.values.unlearning import optimizer_steps
from megatron.objectives import build_objective
from megatron.tokenizer import Tokenizer, build_tokenizer, describe, with_masked_ids, with_vocabulary
from megatron.training.callbacks.best_model import check_best
from megatron.training.callbacks.from_file import load_callbacks
from megatron.training.callbacks.profiling import record_memory_history
from megatron.training.checkpoint.resume import Checkpointer
from megatron.training.checkpoint.same_run import begun_of, continued
from megatron.training.checkpoint.source import (
    adopt_vocabulary,
    choose_source,
    fetch_remote_source,
    mask_padding,
    real_rows,
)
from megatron.training.compile_blocks import resolve_compile
from megatron.training.determinism import make_deterministic
from megatron.training.distillation.description import describe_teacher, with_common_rows
from megatron.training.distillation.start import with_teacher
from megatron.training.engine import Engine
from megatron.training.engine_choice import choose_engine
from megatron.training.native.update_keys import resolve_update_keys
from megatron.training.out_of_memory import explained
from megatron.training.parallelize import parallelize
from megatron.training.precision_policy import recorded_precision
from megatron.training.preference.reference import resume_with_reference
from megatron.training.run import Training
from megatron.training.schedules import build_schedule


def _backward_reach(args: NeoXArgs) -> str:
    lowest = lowest_trained(args)
    if lowest > 0:
        return f"layers below {lowest} run forwards alone"
    if args.no_weight_tying or not (args.trainable and args.trainable["head"]):
        return "all layers run backwards, down to the embedding"
    return "the head is the embedding, so all layers run backwards; trainable.embedding_gradient: false leaves that out"


def build_engine(
    args: NeoXArgs,
    groups: ParallelGroups,
    logger: logging.Logger | None = None,
    engine: type[Engine] | None = None,
) -> Engine:
    """A freshly initialised model under its engine; `args` knows its world and vocabulary. engine: None: as
    `choose_engine` says."""
    if engine is None:
        engine = choose_engine(args, groups.device.type == "cuda").load()
    say = logger.info if logger is not None else None
    args = resolve_compile(args, groups.device, engine.name, say)
    args = resolve_update_keys(args, groups, engine.name, say)
    stage: Stage = build_stage(args, groups, log=say)
    notes = [f"trainable: {_backward_reach(args)}"] if args.trainable is not None else []
    for note in [*engine.notes(args), *notes]:
        if say is not None:
            say(note)
    return parallelize(stage, build_objective(args), args, groups, engine, say)


def _on_writers(args: NeoXArgs, groups: ParallelGroups, process: Process) -> Callable[[Callable[[], Any]], Any]:
    """A function that does work on rank 0 (without `use_shared_fs`: on the first rank of every machine) while
    all others wait, and gives all of them rank 0's result; index maps are written by it.

    Raises DataError when machines that share no files hold different data.
    """
    if args.use_shared_fs:
        return lambda work: on_rank_zero(groups, work)
    first = process.local_rank == 0
    fingerprints = run_on_all_ranks(groups, lambda: data_fingerprint(args) if first else None)
    for rank, data in enumerate(fingerprints):
        if data is not None and data != fingerprints[0]:
            raise DataError(f"use_shared_fs: false: the data on rank {rank}'s machine is not that of rank 0's; copy it")

    def write(work: Callable[[], Any]) -> Any:
        made: list[Any] = []
        run_on_all_ranks(groups, lambda: made.append(work()) if first else None)
        return on_rank_zero(groups, lambda: made[0])

    return write


def _with_iterations(args: NeoXArgs, steps: int, key: str) -> NeoXArgs:
    """The configuration of a run of so many iterations, which follow from `key`: the schedule and its checks
    follow."""
    place = args.origin(key)
    more: dict[str, Any] = {}
    if key == "train_epochs" and args.lr_decay_iters is None and (args.warmup_iters or 0) > steps:
        more["lr_decay_iters"] = args.warmup_iters  # the run ends while it warms up, as in other stacks
    args = args.replace(train_epochs=None, train_iters=steps, **more)
    return replace(args, origins=FrozenDict({**args.origins, key: place, "train_iters": place}))


def _log_configuration(args: NeoXArgs, tokenizer: Tokenizer, logger: logging.Logger) -> None:
    """Where the run saves, the resolved configuration, the vocabulary and the notes on single keys, a line
    each.

    People take a run's name from the first path in its log, up to a quote, as GPT-NeoX's dump begins with the
    text of the files. It must not be the path of `load`.
    """
    if args.save is not None:
        logger.info(f'checkpoints: "{args.save}"')
    logger.info(arguments_dump(args))
    logger.info(describe(tokenizer, args.padded_vocab_size))
    if args.softmax_rows is not None:
        logger.info(
            f"mask_padded_vocab: {args.softmax_rows} of {args.padded_vocab_size} rows of the vocabulary take part in "
            "the softmax"
        )
    for note in (*args.startup_notes(), *router_notes(args)):
        logger.info(note)


def start(configuration: NeoXArgs | MutableNeoXArgs, process: Process, engine: type[Engine] | None = None) -> Training:
    """Build a run up to its first step, on every rank. engine: None: as `choose_engine` says."""
    logger = configure_logging(process.rank)
    args = configuration.frozen().check_training().for_world(process.world_size)
    if engine is None and args.engine != "auto":  # else it may be a checkpoint's
        engine = choose_engine(args, torch.cuda.is_available()).load()
    if engine is not None:
        engine.check(args)
    check_curriculum(args)
    make_deterministic(args, logger.info)
    watchdog = Watchdog(args, process.world_size, logger)
    store = rendezvous_and_check(args, process, logger, shared=None if is_remote(args.save) else args.save)
    fetch_remote_source(args)
    groups = init_model_parallel(args, process, logger, store)
    check_transport(args, groups, process, logger)
    user_callbacks = run_on_each_rank(groups, lambda: load_callbacks(args))
    if args.params_dtype == "fp16" and groups.device.type == "cpu":
        logger.info("precision: fp16 is slow on CPUs; --set precision=bfloat16 fp16=null is faster there")
    tokenizer = build_tokenizer(args)
    source = on_rank_zero(groups, lambda: choose_source(args))
    manifest = on_rank_zero(groups, lambda: continued(args, source))
    if engine is None:
        recorded = manifest.engine if manifest is not None else None
        choice = choose_engine(args, groups.device.type == "cuda", recorded)
        engine = choice.load()
        engine.check(args)
        logger.info(f"engine: {choice.name} ({choice.reason})")
    args = resolve_compile(args, groups.device, engine.name, logger.info)
    if manifest is not None:  # behind `compile`, so that the run goes on with kernels chosen as at its first start
        args = recorded_precision(args, manifest.config.get("precision_fp8"), logger.info)
    args = with_masked_ids(args, tokenizer)
    args = adopt_vocabulary(args, source, tokenizer.vocab_size)
    real = on_rank_zero(groups, lambda: real_rows(source, tokenizer.vocab_size))
    teacher = None
    if args.distillation is None:
        args = mask_padding(with_vocabulary(args, tokenizer), real, tokenizer.vocab_size)
    else:
        teacher = run_on_each_rank(groups, lambda: describe_teacher(args, tokenizer))
        args = with_vocabulary(adopt_vocabulary(args, teacher.source, tokenizer.vocab_size), tokenizer)
        args = with_common_rows(args, teacher, real, tokenizer)
    trained_parameters(args)  # raises for a pattern that finds nothing, before anything is read
    watchdog.now("reading the data")
    on_one_rank = _on_writers(args, groups, process)
    resumed_data_state = begun_of(manifest)
    epochs = args.train_epochs
    if epochs is not None:
        steps = on_rank_zero(groups, lambda: epoch_iterations(args, args.train_batch_size, resumed_data_state))
        args = _with_iterations(args, steps, "train_epochs")
        logger.info(f"train_epochs: {epochs} passes over the data are {args.train_iters} iterations")
        if args.warmup_iters is not None and args.warmup_iters > args.train_iters:
            logger.info(
                f"warmup_iters: {args.cite('warmup_iters')} is more than these iterations: the learning rate rises to "
                f"the end, to {args.train_iters / args.warmup_iters:.2g} of lr; set fewer"
            )
    steps = optimizer_steps(args, args.train_iters)
    if steps != args.train_iters:
        bursts = f"{args.train_iters} iterations with bursts of {args.ga_iters}"
        logger.info(f"ga_mode: interval: {bursts} are {steps} optimizer steps")
        args = _with_iterations(args, steps, "train_iters")
    _log_configuration(args, tokenizer, logger)
    for line in on_rank_zero(groups, lambda: data_log_lines(args)):
        logger.info(line)
    datasets = build_datasets(
        args, train_batch_size=args.train_batch_size, once=on_one_rank, epochs=epochs, data_state=resumed_data_state
    )
    datasets = with_sequences(args, datasets, tokenizer.eod)
    for line in datasets.log_lines:
        logger.info(line)
    record_memory_history(args, groups)
    watchdog.now("building the model")
    try:
        built = build_engine(args, groups, logger, engine)
    except RuntimeError as problem:
        raise explained(problem, args, groups.world_rank, groups.device, watchdog.doing) from problem
    args = built.args  # with the recipe that `precision_fp8: auto` chose
    check_best(args, built.objective, datasets.valid)
    schedule = build_schedule(args)
    scaling = f" (lr_scaling: {args.lr_scaling}, {args.data_parallel_size} data-parallel ranks)"
    logger.info(schedule.describe() + (scaling if args.lr_scaling != "none" else ""))
    order = order_keys(args, epochs)
    checkpointer = Checkpointer(args, groups, built, schedule, tokenizer, datasets, order, source, logger)
    seed_generators(args.seed, groups.device)
    watchdog.now("loading a checkpoint")
    datasets, progress = resume_with_reference(checkpointer, watchdog)
    if teacher is not None:
        watchdog.now("loading the teacher")
        datasets = with_teacher(args, groups, teacher, built, datasets, tokenizer, logger, watchdog)
    schedule = checkpointer.schedule  # the checkpoint's, with use_checkpoint_lr_scheduler
    return Training(
        args, groups, tokenizer, datasets, built, schedule, checkpointer, progress, logger, watchdog, user_callbacks
    )
