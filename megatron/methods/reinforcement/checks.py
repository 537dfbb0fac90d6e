"""Checks of the keys of reinforcement learning: prompts, answers, rewards and losses."""

import re

from megatron.methods.reinforcement.keys import (
    DATASERVER_KEYS,
    ReinforcementKeys,
    Rollout,
    dataservers,
    rollout_keys,
    rollout_servers,
)
from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import losses_of, sample_kind, writes_pairs

_CONFLICTS = {
    "data_path": "prompts come from rollout.prompts",
    "train_data_paths": "prompts come from rollout.prompts",
    "valid_data_paths": "prompts come from rollout.prompts",
    "test_data_paths": "prompts come from rollout.prompts",
    "train_epochs": "set the length of the run by train_iters",
    "seq_curriculum": "would cut answers",
    "curriculum_learning": "would cut answers",
    "eod_mask_loss": "the end of an answer is trained",
    "loss_mask_token_ids": "all tokens of an answer are trained",
    "reset_attention_mask": "a row holds one answer",
    "reset_position_ids": "a row holds one answer",
    "pack_impl": "a row holds one answer",
    "allow_chopped": "answers are never cut",
    "truncate_documents": "is for documents; see rollout.max_prompt_length",
    "drop_last": "is for documents",
    "limit_samples": "set the length of the run by train_iters",
    "precompute_model_name": "answers do not exist before training",
    "prefix_sharing": "a row holds one answer",
}


_ENVIRONMENT_KEYS = ("environment_workers", "max_turns")
_SERVER_KEYS = ("server_api", "server_timeout_s", "sync", "staleness")


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Check that runs whose model writes the samples set all keys that they need, and none that conflict."""
    keys = ReinforcementKeys.read_from(args)
    online = args.dataset_impl == "online"
    if sample_kind(args) != "generated":
        if online:
            problems.add(
                "dataset_impl",
                f"online is for train_impl: reinforce and dpo, not {args.cite('train_impl')}; set one of these",
            )
        for key in ("serve_model_weights", "weight_server_port", *DATASERVER_KEYS):
            if getattr(args, key) != keys_of(type(args))[key].default:
                problems.add(key, "is for rollout.servers, with dataset_impl: online; set these, or remove it")
        return
    if not online:
        problems.add("dataset_impl", f"train_impl {args.cite('train_impl')} writes its own samples; set online")
    for key, reason in _CONFLICTS.items():
        if args.user_values.get(key) is not None and getattr(args, key) != keys_of(type(args))[key].default:
            problems.add(key, f"{reason}; remove it, or dataset_impl ({args.origin('dataset_impl')})")
    _rewards(args, problems)
    if args.moe_num_experts > 1:
        unlike = [key for key in ("moe_jitter_eps", "moe_expert_capacity_factor") if getattr(args, key) is not None]
        for key in [*unlike, *(["moe_router_type"] if args.moe_router_type == "sinkhorn" else [])]:
            problems.add(key, "makes training choose other experts than sampling, so training would differ from the "
                              f"model that wrote the answers; change it (now {args.cite(key)})")  # fmt: skip
    if args.train_impl == "reinforce":
        _policy(args, problems)
    if keys.rollout is None:
        problems.add("rollout.prompts", f"is required by train_impl {args.cite('train_impl')} with dataset_impl: "
                     "online: files of prompts")  # fmt: skip
        return
    _rollout(args, problems)
    (_pairs if writes_pairs(args) else _groups)(args, problems)


def _policy(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys = ReinforcementKeys.read_from(args)
    if keys.rl_loss_type == "cispo" and keys.rl_epsilon_high is None:
        problems.add("rl_epsilon_high", "is required by rl_loss_type: cispo, as its largest ratio; 5 is common")
    if keys.rl_loss_type == "cispo" and args.user_values.get("rl_epsilon") is not None:
        problems.add("rl_epsilon", "cispo has no lower bound; remove it")
    if keys.kl_div_beta == 0.0:
        for key in ("kl_impl", "rl_kl_in_reward", "rl_kl_by_ratio"):
            if getattr(args, key) != keys_of(type(args))[key].default:
                problems.add(key, f"nothing reads it while kl_div_beta is 0 ({args.origin('kl_div_beta')}); remove it")
    elif keys.rl_kl_in_reward and keys.kl_impl == "full":
        problems.add("kl_impl", "full is a loss over full distributions, not a reward; set another value for "
                     f"rl_kl_in_reward ({args.origin('rl_kl_in_reward')})")  # fmt: skip
    elif keys.rl_kl_by_ratio and (keys.rl_kl_in_reward or keys.kl_impl == "full"):
        problems.add("rl_kl_by_ratio", "needs a per-token KL in the loss; remove it, or "
                     f"{args.cite('rl_kl_in_reward' if keys.rl_kl_in_reward else 'kl_impl')}")  # fmt: skip


def _rewards(args: ResolvedArgs, problems: ErrorCollector) -> None:
    method_keys = ReinforcementKeys.read_from(args)
    environment = None if method_keys.rollout is None else method_keys.rollout["environment"]
    judges = [*(method_keys.reward_functions or ()), *filter(None, [method_keys.reward_model, environment])]
    weights = method_keys.reward_weights
    if method_keys.rollout is not None and method_keys.rollout["judge"] is not None:
        keys = [key for key in ("reward_functions", "reward_model", "reward_weights") if getattr(args, key)]
        for key in [*keys, *(["rollout.environment"] if environment else [])]:
            problems.add(key, f"rollout.judge ({args.origin('rollout.judge')}) judges answers; remove one of the two")
    elif not judges:
        other_judges = f"reward_model, rollout.environment{' or rollout.judge' if writes_pairs(args) else ''}"
        problems.add("reward_functions", f"is required by train_impl {args.cite('train_impl')} to judge answers (or "
                     f"one of {other_judges})")  # fmt: skip
    elif weights is not None and len(weights) != len(judges):
        problems.add("reward_weights", f"expected {len(judges)}, for {', '.join(judges)}, got {len(weights)}")


def _rollout(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys, rollout = ReinforcementKeys.read_from(args), rollout_keys(args)
    max_completion, max_prompt = rollout["max_completion_length"], rollout["max_prompt_length"]
    if (max_prompt or 1) + 1 > args.seq_length:
        problems.add(
            "rollout.max_prompt_length", f"leaves no room for answers in seq_length {args.cite('seq_length')}; lower it"
        )
    elif max_completion > args.seq_length:
        problems.add("rollout.max_completion_length", f"is more than seq_length {args.cite('seq_length')}; lower it")
    if (keys.rl_overlong_buffer or 0) > max_completion:
        problems.add("rl_overlong_buffer", f"is more than the longest answer ({max_completion} tokens, "
                     f"{args.origin('rollout.max_completion_length')}); lower it")  # fmt: skip
    needs_groups = writes_pairs(args) or keys.rl_loss_type != "reinforce" or keys.reinforce_leave_one_out
    if rollout["num_generations"] == 1 and needs_groups:
        problems.add("rollout.num_generations", "an answer alone cannot be compared with others; set 2 or more (now "
                     f"{args.origin('rollout.num_generations')})")  # fmt: skip
    if rollout["exact"] and args.compile not in (False, "auto"):
        problems.add("rollout.exact", "compiled blocks round differently in passes without gradients, such as "
                     "sampling; set compile: auto")  # fmt: skip
    for name in _ENVIRONMENT_KEYS:
        if rollout["environment"] is None and rollout[name] != keys_of(Rollout)[name].default:
            problems.add(f"rollout.{name}", "needs rollout.environment; set that, or remove it")
    if rollout["servers"] == ():
        problems.add("rollout.servers", "is empty; remove it to let the training processes write the answers")
    _servers(args, problems)


def _groups(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Check the keys of runs that train every answer by a reward of its own."""
    rollout = rollout_keys(args)
    if rollout["judge"] is not None:
        problems.add("rollout.judge", "compares two answers, but train_impl "
                     f"{args.cite('train_impl')} needs a reward for each answer; set train_impl: dpo, or "
                     "reward_functions")  # fmt: skip
    answers = args.train_batch_size and args.train_batch_size * rollout["steps_per_generation"]
    if answers and answers % rollout["num_generations"]:
        problems.add("rollout.num_generations", f"{rollout['num_generations']} answers per prompt do not divide "
                     f"the {answers} answers of a generation (train_batch_size x steps_per_generation)")  # fmt: skip


def _pairs(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Check the keys of runs that train two of the answers to each prompt (online DPO)."""
    rollout = rollout_keys(args)
    answers, temperature = rollout["num_generations"], rollout["temperature"]
    if answers != 2 and rollout["judge"] is not None:
        problems.add("rollout.num_generations", f"rollout.judge ({args.origin('rollout.judge')}) compares two answers; "
                     f"set 2 (now {answers}, {args.origin('rollout.num_generations')})")  # fmt: skip
    if answers != 2 and rollout["exact"]:
        problems.add("rollout.num_generations", "only two answers per prompt are trained, so with more, the batches "
                     "of sampling and training differ; set 2, or remove rollout.exact")  # fmt: skip
    if rollout["environment"] is not None and "orpo" in losses_of(args):
        problems.add("dpo_loss_type", "orpo trains on prompts and answers, but text of rollout.environment "
                     f"({args.origin('rollout.environment')}) must not be trained; remove orpo or that")  # fmt: skip
    if rollout["missing_eos_penalty"] is not None and rollout["judge"] is not None:
        problems.add("rollout.missing_eos_penalty", "is subtracted from rewards; rollout.judge gives none; remove it")
    if temperature == 0:
        problems.add("rollout.temperature", "0 makes all answers to a prompt equal, with nothing to compare; "
                     f"set it above 0 (now {args.origin('rollout.temperature')})")  # fmt: skip
    elif temperature != 1 and rollout["logprob_bound"] and rollout_servers(args):
        problems.add("rollout.logprob_bound", "servers give log-probabilities at rollout.temperature "
                     f"({temperature}, {args.origin('rollout.temperature')}), but the loss needs 1; set it to 0, "
                     "or rollout.temperature to 1")  # fmt: skip


def _servers(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys, rollout, servers = ReinforcementKeys.read_from(args), rollout_keys(args), rollout_servers(args)
    if not servers:
        defaults = {name: key.default for name, key in keys_of(Rollout).items()}
        for name in _SERVER_KEYS:
            if rollout[name] != defaults[name]:
                problems.add(f"rollout.{name}", "needs rollout.servers: without, training processes write the answers; "
                             "set that, or remove it")  # fmt: skip
        if keys.serve_model_weights:
            problems.add("serve_model_weights", "needs rollout.servers to fetch the weights; set that, or remove it")
        return
    dataserver_keys = [key for key in DATASERVER_KEYS if args.user_values.get(key) is not None]
    if rollout["servers"] is not None and dataserver_keys:
        problems.add(
            dataserver_keys[0], f"rollout.servers ({args.origin('rollout.servers')}) says the same; remove either key"
        )
    elif dataserver_keys and len({len(values) for values in dataservers(args)} - {1}) > 1:
        problems.add(dataserver_keys[0], "expected as many hosts as ports, or one of either")
    for address in servers:
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
            problems.add("rollout.servers", f"{address}: expected http://HOST:PORT")
        elif without_secrets(address) != address:
            problems.add(
                "rollout.servers",
                f"{address}: user, password and query are not sent, but would appear in logs and checkpoints; "
                "remove them, and set the server's token in NEOX_SERVE_TOKEN",
            )
    fix = f"; remove it, or rollout.servers ({args.origin('rollout.servers')})"
    if rollout["exact"]:
        problems.add("rollout.exact", f"needs sampling by training's own forward pass{fix}")
    if args.lora is not None:
        problems.add("lora", f"servers load full models, not adapters{fix}")
    if rollout["sync"] is None and (args.save is None or "://" in args.save):
        problems.add("rollout.sync", "is required, for servers to load weights; set it to a folder shared with them")
    if keys.serve_model_weights:
        if rollout["server_api"] != "openai":
            problems.add("serve_model_weights", f"{rollout['server_api']} loads weights only from folders "
                         f"({args.origin('rollout.server_api')}); remove it, and set rollout.sync to a shared "
                         "folder")  # fmt: skip
        if not isinstance(keys.weight_server_port, int) and len(keys.weight_server_port) != 1:
            problems.add("weight_server_port", "one server hands out all weights; give one port")
