"""Checks the configuration keys of reinforcement learning and online DPO: prompts, answers, rewards and
losses."""

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
    "data_path": "dataset_impl: online reads rollout.prompts in place of a dataset",
    "train_data_paths": "dataset_impl: online reads rollout.prompts in place of a dataset",
    "valid_data_paths": "dataset_impl: online reads rollout.prompts in place of a dataset",
    "test_data_paths": "dataset_impl: online reads rollout.prompts in place of a dataset",
    "train_epochs": "with dataset_impl: online, train_iters sets the length of the run",
    "seq_curriculum": "a curriculum would truncate the answers that the model writes",
    "curriculum_learning": "a curriculum would truncate the answers that the model writes",
    "eod_mask_loss": "dataset_impl: online must train the end token of each answer",
    "loss_mask_token_ids": "dataset_impl: online trains all tokens of an answer",
    "reset_attention_mask": "with dataset_impl: online a row holds one answer, so no documents need separation",
    "reset_position_ids": "with dataset_impl: online a row holds one answer, so no documents need separation",
    "pack_impl": "with dataset_impl: online a row holds one answer, so nothing is packed",
    "allow_chopped": "dataset_impl: online never splits answers",
    "truncate_documents": "dataset_impl: online has no documents (rollout.max_prompt_length truncates prompts)",
    "drop_last": "dataset_impl: online has no documents",
    "limit_samples": "with dataset_impl: online, train_iters sets the length of the run",
    "precompute_model_name": "with dataset_impl: online there are no answers to score before training",
    "prefix_sharing": "with dataset_impl: online a row holds one answer, so there is no prefix to share",
}


_ENVIRONMENT_KEYS = ("environment_workers", "max_turns")
_SERVER_KEYS = ("server_api", "server_timeout_s", "sync", "staleness")


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes problems of runs whose model writes the samples (`dataset_impl: online`): missing and conflicting
    keys.

    For other runs it notes keys that only such runs read.
    """
    keys = ReinforcementKeys.read_from(args)
    online = args.dataset_impl == "online"
    if sample_kind(args) != "generated":
        if online:
            problems.add(
                "dataset_impl",
                f"online needs train_impl: reinforce or dpo, not {args.cite('train_impl')}; change train_impl, or "
                "remove dataset_impl",
            )
        for key in ("serve_model_weights", "weight_server_port", *DATASERVER_KEYS):
            if getattr(args, key) != keys_of(type(args))[key].default:
                problems.add(
                    key,
                    "has no effect without dataset_impl: online and rollout.servers; set both, or remove this key",
                )
        return
    if not online:
        problems.add(
            "dataset_impl",
            f"with train_impl {args.cite('train_impl')} the model writes the answers to train on; set dataset_impl: "
            "online",
        )
    for key, reason in _CONFLICTS.items():
        if args.user_values.get(key) is not None and getattr(args, key) != keys_of(type(args))[key].default:
            problems.add(key, f"{reason}; remove this key, or dataset_impl ({args.origin('dataset_impl')})")
    _rewards(args, problems)
    if args.moe_num_experts > 1:
        unlike = [key for key in ("moe_jitter_eps", "moe_expert_capacity_factor") if getattr(args, key) is not None]
        for key in [*unlike, *(["moe_router_type"] if args.moe_router_type == "sinkhorn" else [])]:
            problems.add(
                key,
                "makes training route tokens to other experts than sampling does, so the trained model "
                "would differ from the model that wrote the answers; change this key (now "
                f"{args.cite(key)})",
            )
    if args.train_impl == "reinforce":
        _policy(args, problems)
    if keys.rollout is None:
        problems.add(
            "rollout.prompts",
            f"is required with train_impl {args.cite('train_impl')} and dataset_impl: "
            "online; set it to a list of JSONL files of prompts",
        )
        return
    _rollout(args, problems)
    (_pairs if writes_pairs(args) else _groups)(args, problems)


def _policy(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys = ReinforcementKeys.read_from(args)
    if keys.rl_loss_type == "cispo" and keys.rl_epsilon_high is None:
        problems.add(
            "rl_epsilon_high",
            "is required with rl_loss_type: cispo, which truncates larger ratios to this value; 5 is common",
        )
    if keys.rl_loss_type == "cispo" and args.user_values.get("rl_epsilon") is not None:
        problems.add(
            "rl_epsilon", "has no effect with rl_loss_type: cispo, which does not clip small ratios; remove rl_epsilon"
        )
    if keys.kl_div_beta == 0.0:
        for key in ("kl_impl", "rl_kl_in_reward", "rl_kl_by_ratio"):
            if getattr(args, key) != keys_of(type(args))[key].default:
                problems.add(
                    key,
                    f"has no effect while kl_div_beta is 0 ({args.origin('kl_div_beta')}); remove this key, or set "
                    "kl_div_beta above 0",
                )
    elif keys.rl_kl_in_reward and keys.kl_impl == "full":
        problems.add(
            "kl_impl",
            "full compares full distributions and can only be a loss, not part of the reward; change "
            f"kl_impl, or remove rl_kl_in_reward ({args.origin('rl_kl_in_reward')})",
        )
    elif keys.rl_kl_by_ratio and (keys.rl_kl_in_reward or keys.kl_impl == "full"):
        problems.add(
            "rl_kl_by_ratio",
            "needs a per-token KL in the loss; remove rl_kl_by_ratio, or change "
            "rl_kl_in_reward: true or kl_impl: full, whichever is now "
            f"{args.cite('rl_kl_in_reward' if keys.rl_kl_in_reward else 'kl_impl')}",
        )


def _rewards(args: ResolvedArgs, problems: ErrorCollector) -> None:
    method_keys = ReinforcementKeys.read_from(args)
    environment = None if method_keys.rollout is None else method_keys.rollout["environment"]
    judges = [*(method_keys.reward_functions or ()), *filter(None, [method_keys.reward_model, environment])]
    weights = method_keys.reward_weights
    if method_keys.rollout is not None and method_keys.rollout["judge"] is not None:
        keys = [key for key in ("reward_functions", "reward_model", "reward_weights") if getattr(args, key)]
        for key in [*keys, *(["rollout.environment"] if environment else [])]:
            problems.add(
                key,
                f"has no effect with rollout.judge ({args.origin('rollout.judge')}), which judges answers in place of "
                "rewards; remove one of the two keys",
            )
    elif not judges:
        other_judges = f"reward_model, rollout.environment{' or rollout.judge' if writes_pairs(args) else ''}"
        problems.add(
            "reward_functions",
            f"train_impl {args.cite('train_impl')} needs something that judges answers; set "
            f"reward_functions, or one of {other_judges}",
        )
    elif weights is not None and len(weights) != len(judges):
        problems.add("reward_weights", f"expected {len(judges)} weights, for {', '.join(judges)}, got {len(weights)}")


def _rollout(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys, rollout = ReinforcementKeys.read_from(args), rollout_keys(args)
    max_completion, max_prompt = rollout["max_completion_length"], rollout["max_prompt_length"]
    if (max_prompt or 1) + 1 > args.seq_length:
        problems.add(
            "rollout.max_prompt_length",
            f"prompts of this length leave no room for an answer in seq_length {args.cite('seq_length')}; lower "
            "max_prompt_length, or raise seq_length",
        )
    elif max_completion > args.seq_length:
        problems.add(
            "rollout.max_completion_length",
            f"is larger than seq_length {args.cite('seq_length')}; lower max_completion_length, or raise seq_length",
        )
    if (keys.rl_overlong_buffer or 0) > max_completion:
        problems.add(
            "rl_overlong_buffer",
            f"is larger than rollout.max_completion_length ({max_completion} tokens, "
            f"{args.origin('rollout.max_completion_length')}); lower rl_overlong_buffer",
        )
    needs_groups = writes_pairs(args) or keys.rl_loss_type != "reinforce" or keys.reinforce_leave_one_out
    if rollout["num_generations"] == 1 and needs_groups:
        problems.add(
            "rollout.num_generations",
            "the loss compares the answers to a prompt with each other, but "
            f"num_generations is 1 ({args.origin('rollout.num_generations')}); set 2 or more",
        )
    if rollout["exact"] and args.compile not in (False, "auto"):
        problems.add(
            "rollout.exact",
            "needs sampling and training to round alike, but compiled blocks round differently "
            "in passes without gradients; set compile: auto",
        )
    for name in _ENVIRONMENT_KEYS:
        if rollout["environment"] is None and rollout[name] != keys_of(Rollout)[name].default:
            problems.add(
                f"rollout.{name}",
                "has no effect without rollout.environment; set rollout.environment, or remove this key",
            )
    if rollout["servers"] == ():
        problems.add(
            "rollout.servers",
            "is an empty list; name a server, or remove this key to let the training processes write the answers",
        )
    _servers(args, problems)


def _groups(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes problems with the keys of runs that train every answer by a reward of its own."""
    rollout = rollout_keys(args)
    if rollout["judge"] is not None:
        problems.add(
            "rollout.judge",
            "a judge compares two answers, but train_impl "
            f"{args.cite('train_impl')} needs a reward for each answer; set train_impl: dpo, or set "
            "reward_functions in place of rollout.judge",
        )
    answers = args.train_batch_size and args.train_batch_size * rollout["steps_per_generation"]
    if answers and answers % rollout["num_generations"]:
        problems.add(
            "rollout.num_generations",
            f"{rollout['num_generations']} answers per prompt do not divide "
            f"the {answers} answers of a generation (train_batch_size x steps_per_generation); change one of "
            "the three",
        )


def _pairs(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes problems with the keys of runs that train a pair of the answers to each prompt (online DPO)."""
    rollout = rollout_keys(args)
    answers, temperature = rollout["num_generations"], rollout["temperature"]
    if answers != 2 and rollout["judge"] is not None:
        problems.add(
            "rollout.num_generations",
            f"rollout.judge ({args.origin('rollout.judge')}) compares exactly two "
            f"answers per prompt; set 2 (now {answers}, {args.origin('rollout.num_generations')})",
        )
    if answers != 2 and rollout["exact"]:
        problems.add(
            "rollout.num_generations",
            "rollout.exact needs equal batches in sampling and training, but only two "
            "answers per prompt are trained; set num_generations: 2, or remove rollout.exact",
        )
    if rollout["environment"] is not None and "orpo" in losses_of(args):
        problems.add(
            "dpo_loss_type",
            "orpo trains on prompts too, but text of rollout.environment "
            f"({args.origin('rollout.environment')}) must not be trained; remove orpo or "
            "rollout.environment",
        )
    if rollout["missing_eos_penalty"] is not None and rollout["judge"] is not None:
        problems.add(
            "rollout.missing_eos_penalty",
            "is subtracted from rewards, but rollout.judge gives no rewards; remove missing_eos_penalty",
        )
    if temperature == 0:
        problems.add(
            "rollout.temperature",
            "0 makes all answers to a prompt equal, so none is better than another; "
            f"set it above 0 (it is set in {args.origin('rollout.temperature')})",
        )
    elif temperature != 1 and rollout["logprob_bound"] and rollout_servers(args):
        problems.add(
            "rollout.logprob_bound",
            "cannot be checked: servers report log-probabilities at rollout.temperature "
            f"({temperature}, {args.origin('rollout.temperature')}), the loss computes them at temperature 1; "
            "set logprob_bound: 0, or rollout.temperature: 1",
        )


def _servers(args: ResolvedArgs, problems: ErrorCollector) -> None:
    keys, rollout, servers = ReinforcementKeys.read_from(args), rollout_keys(args), rollout_servers(args)
    if not servers:
        defaults = {name: key.default for name, key in keys_of(Rollout).items()}
        for name in _SERVER_KEYS:
            if rollout[name] != defaults[name]:
                problems.add(
                    f"rollout.{name}",
                    "has no effect without rollout.servers, since the training processes then "
                    "write the answers; set rollout.servers, or remove this key",
                )
        if keys.serve_model_weights:
            problems.add(
                "serve_model_weights",
                "has no effect without rollout.servers, which would fetch the weights; set rollout.servers, or remove "
                "this key",
            )
        return
    dataserver_keys = [key for key in DATASERVER_KEYS if args.user_values.get(key) is not None]
    if rollout["servers"] is not None and dataserver_keys:
        problems.add(
            dataserver_keys[0],
            f"rollout.servers ({args.origin('rollout.servers')}) names the servers already; remove one of the two keys",
        )
    elif dataserver_keys and len({len(values) for values in dataservers(args)} - {1}) > 1:
        problems.add(
            dataserver_keys[0],
            "expected as many hosts as ports in online_dataserver_ips and online_dataserver_ports, or one host, or one "
            "port",
        )
    for address in servers:
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
            problems.add("rollout.servers", f"{address}: expected http://HOST:PORT")
        elif without_secrets(address) != address:
            problems.add(
                "rollout.servers",
                f"{address}: remove user, password and query from the address: they are not sent, but would appear in "
                "logs and checkpoints; set the server's token in the environment variable NEOX_SERVE_TOKEN",
            )
    fix = f"; remove this key, or rollout.servers ({args.origin('rollout.servers')})"
    if rollout["exact"]:
        problems.add("rollout.exact", f"needs the training processes to write the answers, not servers{fix}")
    if args.lora is not None:
        problems.add("lora", f"rollout.servers load full models, and cannot load LoRA adapters{fix}")
    if rollout["sync"] is None and (args.save is None or "://" in args.save):
        problems.add(
            "rollout.sync",
            "is required with rollout.servers when save is no local folder; set it to a folder from which the servers "
            "can read new weights",
        )
    if keys.serve_model_weights:
        if rollout["server_api"] != "openai":
            problems.add(
                "serve_model_weights",
                f"rollout.server_api: {rollout['server_api']} "
                f"({args.origin('rollout.server_api')}) loads weights only from folders, not over HTTP; "
                "remove "
                "serve_model_weights, and set rollout.sync to a folder shared with the servers",
            )
        if not isinstance(keys.weight_server_port, int) and len(keys.weight_server_port) != 1:
            problems.add(
                "weight_server_port",
                "expected one port, since rank 0 serves the weights to all servers; remove the others",
            )
