"""Checks keys against each other. Every problem names its key, where it was set, and what to change."""

import re

from megatron.neox_arguments.errors import ErrorCollector, format_value
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.methods import check_methods, declaration_of, further_sets, method_name
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.validation.data import validate_packing, validate_pairs, validate_weights
from megatron.neox_arguments.validation.hub import validate_hub
from megatron.neox_arguments.validation.model import (
    validate_lora,
    validate_model,
    validate_parallel,
    validate_trainable,
)
from megatron.neox_arguments.validation.preferences import validate_preferences
from megatron.neox_arguments.validation.schedule import validate_schedule
from megatron.neox_arguments.values.best_metric import best_metric
from megatron.neox_arguments.values.data_split import cuts_listed_paths
from megatron.neox_arguments.values.losses import least_prefix_saving, sample_kind
from megatron.neox_arguments.values.remote_paths import is_remote, remote_data_error, remote_path_error
from megatron.neox_arguments.values.valid_sets import validate_valid_sets

_DATA_PATHS = re.compile(r"(.+_)?data_paths?")


def validate(args: ResolvedArgs) -> ErrorCollector:
    """Returns the problems of a configuration that every command refuses. `validate_training` and others add
    more."""
    problems = ErrorCollector(args.origins)
    validate_model(args, problems)
    validate_parallel(args, problems)
    validate_trainable(args, problems)
    validate_lora(args, problems)
    validate_schedule(args, problems)
    _logging(args, problems)
    _evaluation(args, problems)
    _gradients(args, problems)
    _recomputation(args, problems)
    _checkpoints(args, problems)
    _data(args, problems)
    validate_valid_sets(args, problems)
    validate_packing(args, problems)
    validate_preferences(args, problems)
    check_methods(args, problems)
    return problems


def validate_planning(args: ResolvedArgs) -> ErrorCollector:
    """Returns the problems of a configuration whose run is to be planned. It needs no data or tokenizer."""
    problems = ErrorCollector(args.origins)
    _require_batch_size(args, problems)
    if args.padded_vocab_size is None and args.vocab_file is None and args.tokenizer_type != "CharLevelTokenizer":
        problems.add("padded_vocab_size", "is required for a plan, unless the keys of a tokenizer are set (vocab_file)")
    return problems


def _require_batch_size(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.train_batch_size is None and args.train_micro_batch_size_per_gpu is None:
        problems.add(
            "train_micro_batch_size_per_gpu",
            "is required (or set train_batch_size, with or without gradient_accumulation_steps)",
        )


def validate_training(args: ResolvedArgs) -> ErrorCollector:
    """Returns the problems of a configuration that matter only to training, such as unset keys that it
    needs."""
    problems = ErrorCollector(args.origins)
    if args.train_iters is None and args.train_epochs is None:
        problems.add(
            "train_iters", "is required for training: set it to the number of optimizer steps (or set train_epochs)"
        )
    if args.data_path is None and args.train_data_paths is None and args.dataset_impl == "gpt2":
        problems.add(
            "data_path", "is required for training (or set train_data_paths, valid_data_paths, test_data_paths)"
        )
    _require_batch_size(args, problems)
    _schedule(args, problems)
    if args.adapter:
        problems.add(
            "adapter",
            "is not read in training; to start from a checkpoint's adapters set load, to train adapters set lora",
        )
    if args.score_head and args.train_impl != "rm":
        problems.add("score_head", f"train_impl {args.cite('train_impl')} trains no reward model; remove score_head")
    for key in ("demo_prompts", "eval_tasks") if args.score_head else ():
        if getattr(args, key):
            problems.add(key, "needs text, but a reward model gives only scores; remove it")
    _remote_data(args, problems)
    _vocab_file(args, problems)
    _best(args, problems)
    _demos(args, problems)
    _fp8(args, problems)
    _qat(args, problems)
    validate_hub(args, problems)
    return problems


def _schedule(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that the keys of the pipeline fit each other."""
    ranks = f"pipe_parallel_size {args.cite('pipe_parallel_size')}"
    if args.pp == 1 and args.pipeline_schedule != "1f1b":
        text = f"{args.pipeline_schedule} needs several pipeline ranks, not {ranks}; change one"
        problems.add("pipeline_schedule", text)
    key, number = "virtual_pipeline_stages", args.virtual_pipeline_stages
    schedule = f"pipeline_schedule {args.cite('pipeline_schedule')}"
    if args.pipeline_schedule == "interleaved" and number == 1:
        problems.add(key, f"1: {schedule} needs 2 or more; raise it, or write pipeline_schedule: 1f1b")
    if args.is_v_pipeline and number not in (None, 2):
        problems.add(key, f"{number}: {schedule} puts 2 stages on each rank; remove this key")
    if args.pipeline_schedule == "1f1b" and number is not None and number > 1:
        problems.add(key, f"{number}: {schedule} has one stage on each rank; write pipeline_schedule: interleaved")
    stages = args.pp * args.stages_per_rank
    if args.pipeline_layers is not None and len(args.pipeline_layers) != stages:
        blocks = list(args.pipeline_layers)
        virtual_stages = f" times virtual_pipeline_stages {args.stages_per_rank}" * (args.stages_per_rank > 1)
        text = f"{blocks} are {len(blocks)} stages, not the {stages} of {ranks}{virtual_stages}; change one"
        problems.add("pipeline_layers", text)


def _remote_data(args: ResolvedArgs, problems: ErrorCollector) -> None:
    further_keys = {key for further in further_sets().values() for key in (further.data, further.labels)}
    for name in [key for key in keys_of(type(args)) if _DATA_PATHS.fullmatch(key) or key in further_keys]:
        paths = getattr(args, name) or ()
        for path in (paths,) if isinstance(paths, str) else paths:
            if (wrong := remote_data_error(path)) is not None:
                problems.add(name, wrong)


def _fp8(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Adds problems if a kind of FP8 is requested by name but cannot be used. `precision_fp8: auto` would
    leave FP8 off instead."""
    key = "precision_fp8" if args.user_values.get("precision_fp8") is not None else "te_fp8_mha"
    if args.precision_fp8 in ("auto", "off"):
        return
    if args.params_dtype != "bf16":
        problems.add(key, f"FP8 needs bf16 weights, but they are {args.params_dtype}; set precision: bfloat16")
    if not args.fp8_blocks:
        problems.add(
            key,
            f"no block of num_layers {args.cite('num_layers')} is left for FP8; set first_last_layers_bf16: false, or "
            "lower num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16",
        )


def _qat(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Adds problems if `qat` is set with keys that it does not support."""
    if args.qat is None:
        return
    if args.lora is not None:
        problems.add("qat", f"rounds weights of linears, which lora {args.cite('lora')} freezes; remove one of them")
    if args.precision_fp8 != "off":
        problems.add("qat", f"cannot be used with precision_fp8 {args.cite('precision_fp8')}; remove one of them")
    if args.engine == "deepspeed":
        problems.add("qat", f"needs engine: native, but engine is {args.cite('engine')}")
    if args.qat == "nvfp4" and args.model_parallel_size > 1:
        size = args.cite("model_parallel_size")
        problems.add("qat", f"nvfp4 scales a full matrix, which model_parallel_size {size} shards; set mxfp4")


def validate_generation(args: ResolvedArgs) -> ErrorCollector:
    """Returns the problems of a configuration that matter only to text generation."""
    problems = ErrorCollector(args.origins)
    if args.load is None and args.save is None:
        problems.add("load", "is required for generation: set it to the folder of the checkpoint, or set save")
    _writes_text(args, problems)
    _vocab_file(args, problems)
    if args.text_gen_type in ("input-file", "score") and args.sample_input_file is None:
        problems.add("sample_input_file", f"is required by text_gen_type: {args.text_gen_type} (or use -i FILE)")
    if args.text_gen_type == "precompute" and args.precompute_model_name is None:
        problems.add("precompute_model_name", "is required by text_gen_type: precompute, which writes files PATH_NAME")
    if args.text_gen_type in ("score", "precompute"):
        return problems
    if args.chat and args.text_gen_type != "interactive":
        problems.add("chat", "works only at the terminal; set text_gen_type: interactive, or remove it")
    if not args.prompt_end:
        problems.add("prompt_end", 'is empty but must separate prompts; set it to "\\n" (in double quotes)')
    _texts(args, problems)
    return problems


def validate_evaluation(args: ResolvedArgs) -> ErrorCollector:
    """Returns the problems of a configuration that matter only to evaluation."""
    problems = ErrorCollector(args.origins)
    if args.load is None and args.save is None:
        problems.add("load", "is required for evaluation: set it to the folder of the checkpoint, or set save")
    if not args.eval_tasks:
        problems.add(
            "eval_tasks", "is required for evaluation: set it to names of tasks (or use --eval_tasks TASK ...)"
        )
    _writes_text(args, problems)
    _vocab_file(args, problems)
    return problems


def _writes_text(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.score_head:
        key = "score_head" if args.train_impl != "rm" else "train_impl"
        problems.add(key, f"{getattr(args, key)}: a reward model gives scores and writes no text; use tools/score.py")


def _evaluation(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.eval_system_prompt is not None and args.eval_system_prompt_file is not None:
        problems.add(
            "eval_system_prompt_file", f"eval_system_prompt is set too: {args.cite('eval_system_prompt')}; remove one"
        )
    if args.eval_limit is not None and args.eval_limit >= 1 and args.eval_limit != int(args.eval_limit):
        problems.add("eval_limit", f"expected a whole number of documents or a share below 1, got {args.eval_limit:g}")


def validate_serving(args: ResolvedArgs) -> ErrorCollector:
    """Returns the problems of a configuration that matter only to tools/serve.py."""
    problems = ErrorCollector(args.origins)
    if args.load is None and args.save is None:
        problems.add("load", "is required for serving: set it to the folder of the checkpoint, or set save")
    _writes_text(args, problems)
    _vocab_file(args, problems)
    return problems


def _gradients(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.user_values.get("fp32_allreduce") and args.communication_data_type not in (None, "fp32"):
        problems.add(
            "fp32_allreduce", f"contradicts communication_data_type {args.cite('communication_data_type')}; remove one"
        )


def _recomputation(args: ResolvedArgs, problems: ErrorCollector) -> None:
    selective = args.recompute_granularity == "selective"
    if selective and not args.checkpoint_activations:
        problems.add(
            "recompute_granularity", "selective needs checkpoint_activations: true, which turns recomputation on"
        )
    if selective and args.checkpoint_num_layers > 1:
        place = args.cite("checkpoint_num_layers")
        problems.add(
            "recompute_granularity", f"selective works on single blocks: checkpoint_num_layers {place} must be 1"
        )
    if selective and args.checkpoint_in_cpu:
        place = args.origin("checkpoint_in_cpu")
        problems.add(
            "recompute_granularity", f"selective excludes checkpoint_in_cpu ({place}); set full, or remove one"
        )
    if args.activation_memory_budget is not None and args.checkpoint_activations:
        place = args.origin("checkpoint_activations")
        problems.add(
            "activation_memory_budget", f"replaces checkpoint_activations ({place}), so only one may be set; remove one"
        )


def _logging(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if (args.profile or args.memory_profiling) and args.profile_step_stop <= args.profile_step_start:
        problems.add(
            "profile_step_stop", f"must be above profile_step_start {args.cite('profile_step_start')}; raise it"
        )
    if args.log_optimizer_states and args.use_bnb_optimizer:
        problems.add(
            "log_optimizer_states", f"norms of 8-bit states cannot be logged (use_bnb_optimizer: "
            f"{args.origin('use_bnb_optimizer')}); remove one of them",
        )  # fmt: skip
    for key in ("log_loss_by_source", "log_spikes_above_sigma"):
        if getattr(args, key) and method_name(args) != "language_modelling":
            problems.add(key, f"is for next-token prediction alone, not {method_name(args)}; remove it")
    if args.log_spikes_above_sigma is not None and args.log_dir is None and args.save is None:
        problems.add("log_spikes_above_sigma", "writes spikes.jsonl into log_dir; set log_dir or save")


def _checkpoints(args: ResolvedArgs, problems: ErrorCollector) -> None:
    factor = args.checkpoint_factor
    saves = factor or args.extra_save_iters is not None or args.save_interval_in_mins or args.ephemeral_save_interval
    if args.save is not None and not (saves or args.init_only):
        problems.add(
            "save", "says where to save, but not when; set checkpoint_factor, extra_save_iters or save_interval_in_mins"
        )
    if factor is not None and args.checkpoint_scale == "linear" and factor != int(factor):
        problems.add(
            "checkpoint_factor", f"expected a whole number of iterations with checkpoint_scale linear, got {factor}"
        )
    if factor is not None and args.checkpoint_scale == "log" and factor <= 1:
        problems.add("checkpoint_factor", f"expected more than 1 with checkpoint_scale log, got {factor}")
    for name in ("save", "load"):
        wrong = remote_path_error(getattr(args, name)) if is_remote(getattr(args, name)) else None
        if wrong is not None:
            problems.add(name, wrong)
    if args.save is not None and args.save.startswith("hf://"):
        problems.add("save", "hf:// (a model on the Hub) can be loaded but not saved to; set a folder or a bucket")
    if (args.local_save is None) != (args.local_save_interval == 0):
        problems.add("local_save", "and local_save_interval need each other; set both, or neither")
    if args.local_save is not None and (args.save is None or is_remote(args.save)):
        problems.add("local_save", "needs save, a folder that all machines share: copies go on from its run; set it")
    if args.local_save is not None and is_remote(args.local_save):
        problems.add("local_save", "is a folder on each machine, not an address; set one, such as /dev/shm/$USER")
    if args.local_save is not None and args.compat_no_save_optim:
        problems.add("local_save", "needs the optimizer's state, without which no run goes on; remove one of the keys")
    if args.on_out_of_memory == "split" and (args.save is None or is_remote(args.save)):
        problems.add("on_out_of_memory", "split needs save, a folder for the step's number; set it, or write stop")
    method = declaration_of(args)
    if args.on_out_of_memory == "split" and (method.prompts_key or method.sets):
        problems.add("on_out_of_memory", "split cannot split steps that do not read the training set; write stop")
    if args.on_out_of_memory == "split" and not method.splits_micro_batches(args):
        problems.add("on_out_of_memory", "split would change the loss, which compares rows of a batch; write stop")
    if args.save_hf is not None and args.save is None:
        problems.add("save_hf", "needs save, the folder in which the HuggingFace model is written")
    for name in ("keep_checkpoints_every", "keep_best_n_checkpoints"):
        if getattr(args, name) is not None and args.keep_last_n_checkpoints is None:
            problems.add(
                name, "without keep_last_n_checkpoints no checkpoint is deleted; set that key, or remove this one"
            )
    if any(iteration < 0 for iteration in args.extra_save_iters or ()):
        problems.add("extra_save_iters", "expected iterations of at least 0")
    _averages(args, problems)
    _qk_clip(args, problems)


def _qk_clip(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks what QK-Clip cannot be combined with."""
    key = "qk_clip_threshold"
    if args.qk_clip_threshold is None:
        return
    if not args.attends:
        problems.add(key, "no block of attention_config has attention; remove it")
    reasons = {
        "use_qk_layernorm": "norms of queries and keys undo any scale of their weights",
        "attention_k_eq_v": "the weights of keys make the values too",
        "clip_qkv": "clamped queries and keys do not follow their weights",
        "te_mha": "Transformer-Engine's names of weights are not known to it",
        "attn_logit_softcapping": "logits have a cap already",
        "lora": "the weights of queries and keys are frozen",
        "trainable": "frozen weights of queries and keys cannot be scaled",
    }
    for name, reason in reasons.items():
        if getattr(args, name):
            problems.add(key, f"{reason} ({name} {args.cite(name)}); remove one of them")
    if args.pos_emb in ("alibi", "rpe"):
        problems.add(key, f"does not scale position biases (pos_emb {args.cite('pos_emb')}); remove it")
    if args.context_parallel_size > 1:
        problems.add(key, f"needs full rows, which context_parallel_size {args.cite('context_parallel_size')} divides")
    if least_prefix_saving(args) is not None:
        problems.add(key, "does not know prompts that two answers share; set prefix_sharing: false")


def _averages(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks what an average of the weights cannot be combined with."""
    if args.ema_decay is None:
        return
    if args.lora is not None:
        problems.add("ema_decay", f"averages no adapters; remove it, or lora {args.cite('lora')}")
    if args.compat_no_save_optim:
        place = args.cite("compat_no_save_optim")
        problems.add("ema_decay", f"is saved with the optimizer's state, which compat_no_save_optim {place} leaves out")
    if "ema" in (args.valid_sets or {}):
        problems.add("valid_sets.ema", "is the place of the averaged weights' validation (ema_decay); rename the set")


def _best(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.save_best is None:
        return
    try:
        metric, _ = best_metric(args.save_best)
    except ValueError as problem:
        problems.add("save_best", str(problem))
        return
    if args.save is None:
        problems.add("save_best", "needs save, the folder in which the best model is kept")
    elif is_remote(args.save):
        problems.add("save_best", f"needs a local folder, not save {args.cite('save')}; save to a local one")
    if metric.startswith("validation/") and args.eval_iters == 0:
        message = f"needs validation: eval_iters is {args.cite('eval_iters')}; set it to a number of batches"
        problems.add("save_best", message)
    if metric.startswith("validation/ema/") and args.ema_decay is not None:
        problems.add("save_best", f"{metric} is of the averaged weights, but the last ones are kept; name another one")
    if metric.startswith("eval_tasks/") and not args.eval_tasks:
        problems.add("save_best", f"{metric}: eval_tasks lists no task; add the task of this metric")


def _demos(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.demo_prompts is None:
        return
    if args.save is None:
        problems.add("demo_prompts", "needs save, the folder in which answers are written")
    _texts(args, problems)


def _texts(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the keys of writing text after prompts, which text generation and `demo_prompts` share."""
    if args.system_prompt_file is not None and not args.chat:
        problems.add("system_prompt_file", "is read only in conversations; set chat: true, or remove it")
    if "" in args.stop_strings:
        problems.add("stop_strings", "an empty string would end every text at once; remove it")
    if args.maximum_tokens >= args.max_position_embeddings - args.opt_pos_emb_offset:
        problems.add(
            "maximum_tokens",
            f"{args.maximum_tokens} leaves no room for a prompt in max_position_embeddings "
            f"{args.cite('max_position_embeddings')}; use at most "
            f"{args.max_position_embeddings - args.opt_pos_emb_offset - 1}",
        )


def _data(args: ResolvedArgs, problems: ErrorCollector) -> None:
    names = ("train_data_paths", "valid_data_paths", "test_data_paths")
    present = [name for name in names if getattr(args, name) is not None]
    if present and args.data_path is not None:
        problems.add("data_path", f"{present[0]} is set too ({args.origin(present[0])}); remove one of them")
    elif present and args.train_data_paths is None:
        problems.add(present[0], "needs train_data_paths too; set it")
    elif present and args.eval_iters > 0 and not (args.valid_data_paths or args.valid_sets or cuts_listed_paths(args)):
        message = "needs valid_data_paths too (or eval_iters: 0, to train without validation"
        problems.add(present[0], f"{message}{'; or split, to hold data out' if sample_kind(args) == 'texts' else ''})")
    parts = args.split.replace("/", ",").split(",")
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        problems.add("split", f'expected up to three shares like "969, 30, 1", got "{args.split}"')
    _blend(args, problems)


def _blend(args: ResolvedArgs, problems: ErrorCollector) -> None:
    weighting_key = next((key for key in ("weight_by_num_documents", "weight_by") if getattr(args, key)), None)
    for name in ("train", "valid", "test"):
        paths_key = f"pos_{name}_data_paths" if args.dataset_impl == "pairwise" else f"{name}_data_paths"
        key, paths = f"{name}_data_weights", getattr(args, paths_key)
        weights, origin = getattr(args, key), args.origin(paths_key)
        if paths == ():
            problems.add(paths_key, "expected at least one path, got none")
        if weights is None:
            continue
        if weighting_key is not None:
            problems.add(key, f"{weighting_key} ({args.origin(weighting_key)}) sets the weights; remove one")
        elif paths is None:
            problems.add(key, f"sets weights for {paths_key}, which is not set; remove it")
        elif len(weights) != len(paths):
            problems.add(
                key, f"expected a weight for each of {len(paths)} paths ({origin}), got {len(weights)} weights"
            )
        if any(weight <= 0 for weight in weights):
            received = format_value(weights)
            problems.add(key, f"expected numbers above 0, got {received}; remove the paths of unwanted data sets")
    validate_weights(args, problems)
    validate_pairs(args, problems)


def _vocab_file(args: ResolvedArgs, problems: ErrorCollector) -> None:
    required_files = {
        "GPT2BPETokenizer": {"vocab_file": "its vocab.json", "merge_file": "its merges.txt"},
        "HFTokenizer": {"vocab_file": "its tokenizer.json"},
        "SPMTokenizer": {"vocab_file": "its SentencePiece .model"},
        "TiktokenTokenizer": {"vocab_file": "the name of its encoding, such as cl100k_base"},
    }
    for key, file in required_files.get(args.tokenizer_type, {}).items():
        if getattr(args, key) is None:
            problems.add(key, f"is required by tokenizer_type {args.cite('tokenizer_type')}: {file}")
