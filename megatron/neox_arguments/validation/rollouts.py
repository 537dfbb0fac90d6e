"""Checks of the keys of reinforcement learning: prompts, answers, rewards and losses."""

import re

from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.sections import Rollout
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import losses_of, sample_kind, writes_pairs
from megatron.neox_arguments.values.rollouts import DATASERVER_KEYS, rollout_servers

_NOT_WITH = {
    "data_path": "prompts are those of rollout.prompts",
    "train_data_paths": "prompts are those of rollout.prompts",
    "valid_data_paths": "prompts are those of rollout.prompts",
    "test_data_paths": "prompts are those of rollout.prompts",
    "train_epochs": "say how long the run is by train_iters",
    "seq_curriculum": "cuts rows, and answers are whole",
    "curriculum_learning": "cuts rows, and answers are whole",
    "eod_mask_loss": "the end of an answer is trained",
    "loss_mask_token_ids": "all tokens of an answer are trained",
    "reset_attention_mask": "a row holds one answer",
    "reset_position_ids": "a row holds one answer",
    "pack_impl": "a row holds one answer",
    "allow_chopped": "answers are whole",
    "truncate_documents": "is for documents; see rollout.max_prompt_length",
    "drop_last": "is for documents",
    "limit_samples": "say how long the run is by train_iters",
    "precompute_model_name": "answers are not known before",
    "prefix_sharing": "a row holds one answer",
}


_OF_ENVIRONMENTS = ("environment_workers", "max_turns")
_OF_SERVERS = ("server_api", "server_timeout_s", "sync", "staleness")


def validate_rollouts(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Check that a run which writes its own samples has what it needs, and asks for nothing else."""
    online = args.dataset_impl == "online"
    if sample_kind(args) != "rollouts":
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
    for key, why in _NOT_WITH.items():
        if args.user_values.get(key) is not None and getattr(args, key) != keys_of(type(args))[key].default:
            problems.add(key, f"{why}; remove it, or dataset_impl ({args.origin('dataset_impl')})")
    _rewards(args, problems)
    if args.moe_num_experts > 1:
        unlike = [key for key in ("moe_jitter_eps", "moe_expert_capacity_factor") if getattr(args, key) is not None]
        for key in [*unlike, *(["moe_router_type"] if args.moe_router_type == "sinkhorn" else [])]:
            problems.add(key, "chooses experts in training otherwise than in sampling, so that another model would be "
                              f"trained than has answered; change it (now {args.cite(key)})")  # fmt: skip
    if args.train_impl == "reinforce":
        _policy(args, problems)
    if args.rollout is None:
        problems.add("rollout.prompts", f"is required by train_impl {args.cite('train_impl')} with dataset_impl: "
                     "online: files of prompts")  # fmt: skip
        return
    _rollout(args, problems)
    (_pairs if writes_pairs(args) else _groups)(args, problems)


def _policy(args: ResolvedArgs, problems: ErrorCollector) -> None:
    if args.rl_loss_type == "cispo" and args.rl_epsilon_high is None:
        problems.add("rl_epsilon_high", "is the largest ratio of rl_loss_type: cispo, which needs it; 5 is common")
    if args.rl_loss_type == "cispo" and args.user_values.get("rl_epsilon") is not None:
        problems.add("rl_epsilon", "cispo has no lower bound; remove it")
    if args.kl_div_beta == 0.0:
        for key in ("kl_impl", "rl_kl_in_reward", "rl_kl_by_ratio"):
            if getattr(args, key) != keys_of(type(args))[key].default:
                problems.add(key, f"nothing reads it while kl_div_beta is 0 ({args.origin('kl_div_beta')}); remove it")
    elif args.rl_kl_in_reward and args.kl_impl == "full":
        problems.add("kl_impl", "full is a loss: its gradient is that of whole distributions; set another for "
                     f"rl_kl_in_reward ({args.origin('rl_kl_in_reward')})")  # fmt: skip
    elif args.rl_kl_by_ratio and (args.rl_kl_in_reward or args.kl_impl == "full"):
        problems.add("rl_kl_by_ratio", "is for a KL of tokens in the loss; remove it, or "
                     f"{args.cite('rl_kl_in_reward' if args.rl_kl_in_reward else 'kl_impl')}")  # fmt: skip


def _rewards(args: ResolvedArgs, problems: ErrorCollector) -> None:
    environment = None if args.rollout is None else args.rollout["environment"]
    judges = [*(args.reward_functions or ()), *filter(None, [args.reward_model, environment])]
    weights = args.reward_weights
    if args.rollout is not None and args.rollout["judge"] is not None:
        keys = [key for key in ("reward_functions", "reward_model", "reward_weights") if getattr(args, key)]
        for key in [*keys, *(["rollout.environment"] if environment else [])]:
            problems.add(key, f"rollout.judge ({args.origin('rollout.judge')}) judges answers; remove one of the two")
    elif not judges:
        others = f"reward_model, rollout.environment{' or rollout.judge' if writes_pairs(args) else ''}"
        problems.add("reward_functions", f"is required by train_impl {args.cite('train_impl')}, or one of {others}: "
                     "what judges answers")  # fmt: skip
    elif weights is not None and len(weights) != len(judges):
        problems.add("reward_weights", f"expected {len(judges)}, of {', '.join(judges)}, got {len(weights)}")


def _rollout(args: ResolvedArgs, problems: ErrorCollector) -> None:
    assert args.rollout is not None
    most, of_prompt = args.rollout["max_completion_length"], args.rollout["max_prompt_length"]
    if (of_prompt or 1) + 1 > args.seq_length:
        problems.add(
            "rollout.max_prompt_length", f"leaves no place for an answer in {args.cite('seq_length')}; lower it"
        )
    elif most > args.seq_length:
        problems.add("rollout.max_completion_length", f"is more than a row holds ({args.cite('seq_length')}); lower it")
    if (args.rl_overlong_buffer or 0) > most:
        problems.add("rl_overlong_buffer", f"is more than an answer may have ({most} tokens, "
                     f"{args.origin('rollout.max_completion_length')}); lower it")  # fmt: skip
    if args.rollout["num_generations"] == 1 and _needs_groups(args):
        problems.add("rollout.num_generations", "an answer alone has nothing to be compared with; set 2 or more (now "
                     f"{args.origin('rollout.num_generations')})")  # fmt: skip
    if args.rollout["exact"] and args.compile not in (False, "auto"):
        problems.add("rollout.exact", "compiled blocks are compiled once more for passes without gradients, and round "
                     "otherwise; set compile: auto")  # fmt: skip
    for name in _OF_ENVIRONMENTS:
        if args.rollout["environment"] is None and args.rollout[name] != keys_of(Rollout)[name].default:
            problems.add(f"rollout.{name}", "is of rollout.environment; set that, or remove it")
    if args.rollout["servers"] == ():
        problems.add("rollout.servers", "names none; remove it, and the training processes write the answers")
    _servers(args, problems)


def _groups(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Check the keys of runs that train every answer by a reward of its own."""
    assert args.rollout is not None
    if args.rollout["judge"] is not None:
        problems.add("rollout.judge", "compares two answers, and train_impl "
                     f"{args.cite('train_impl')} trains each by a reward of its own; set train_impl: dpo, or "
                     "reward_functions")  # fmt: skip
    answers = args.train_batch_size and args.train_batch_size * args.rollout["steps_per_generation"]
    if answers and answers % args.rollout["num_generations"]:
        problems.add("rollout.num_generations", f"{args.rollout['num_generations']} answers to a prompt do not divide "
                     f"the {answers} of a generation (train_batch_size x steps_per_generation)")  # fmt: skip


def _pairs(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Check the keys of runs that train two of the answers to each prompt (online DPO)."""
    assert args.rollout is not None
    answers, temperature = args.rollout["num_generations"], args.rollout["temperature"]
    if answers != 2 and args.rollout["judge"] is not None:
        problems.add("rollout.num_generations", f"rollout.judge ({args.origin('rollout.judge')}) compares two answers; "
                     f"set 2 (now {answers}, {args.origin('rollout.num_generations')})")  # fmt: skip
    if answers != 2 and args.rollout["exact"]:
        problems.add("rollout.num_generations", "of more than two answers not all are trained, and rows that are "
                     "sampled together have other shapes; set 2, or remove rollout.exact")  # fmt: skip
    if args.rollout["environment"] is not None and "orpo" in losses_of(args):
        problems.add("dpo_loss_type", "orpo trains on prompts with their answers, and what rollout.environment "
                     f"({args.origin('rollout.environment')}) says is not trained; remove orpo or that")  # fmt: skip
    if args.rollout["missing_eos_penalty"] is not None and args.rollout["judge"] is not None:
        problems.add("rollout.missing_eos_penalty", "is taken from rewards, and rollout.judge gives none; remove it")
    if temperature == 0:
        problems.add("rollout.temperature", "the likeliest tokens make one answer, which has nothing to be compared "
                     f"with; set it above 0 (now {args.origin('rollout.temperature')})")  # fmt: skip
    elif temperature != 1 and args.rollout["logprob_bound"] and rollout_servers(args):
        problems.add("rollout.logprob_bound", "servers give log-probabilities at the temperature that they draw with "
                     f"({temperature}, {args.origin('rollout.temperature')}), and the loss has them at 1; set it to 0, "
                     "or rollout.temperature to 1")  # fmt: skip


def _servers(args: ResolvedArgs, problems: ErrorCollector) -> None:
    assert args.rollout is not None
    servers = rollout_servers(args)
    if not servers:
        defaults = {name: key.default for name, key in keys_of(Rollout).items()}
        for name in _OF_SERVERS:
            if args.rollout[name] != defaults[name]:
                problems.add(f"rollout.{name}", "is of servers, and the training processes write the answers; set "
                             "rollout.servers, or remove it")  # fmt: skip
        if args.serve_model_weights:
            problems.add("serve_model_weights", "no server is there to fetch them; set rollout.servers, or remove it")
        return
    given = [key for key in DATASERVER_KEYS if args.user_values.get(key) is not None]
    if args.rollout["servers"] is not None and given:
        problems.add(given[0], f"rollout.servers ({args.origin('rollout.servers')}) says the same; remove one of them")
    elif given and len(servers) not in _lengths(args):
        problems.add(given[0], "expected as many hosts as ports, or one of either")
    for address in servers:
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
            problems.add("rollout.servers", f"{address}: expected http://HOST:PORT")
        elif without_secrets(address) != address:
            problems.add(
                "rollout.servers",
                f"{address}: a user, password or query is sent to no server, and would stand in logs and checkpoints; "
                "remove it, and set the server's token in NEOX_SERVE_TOKEN",
            )
    ours = f"; remove it, or rollout.servers ({args.origin('rollout.servers')})"
    if args.rollout["exact"]:
        problems.add("rollout.exact", f"samples by the forward pass of training{ours}")
    if args.lora is not None:
        problems.add("lora", f"servers are given whole models, and adapters are none{ours}")
    if args.rollout["sync"] is None and (args.save is None or "://" in args.save):
        problems.add("rollout.sync", "where servers find the weights; set it to a folder that they see too")
    if args.serve_model_weights:
        if args.rollout["server_api"] != "openai":
            problems.add("serve_model_weights", f"{args.rollout['server_api']} reads weights from folders alone "
                         f"({args.origin('rollout.server_api')}); remove it, and let rollout.sync be a folder that all "
                         "see")  # fmt: skip
        if not isinstance(args.weight_server_port, int) and len(args.weight_server_port) != 1:
            problems.add("weight_server_port", "one server hands out all weights; give one port")


def _lengths(args: ResolvedArgs) -> set[int]:
    """How many servers the hosts, and the ports, of GPT-NeoX's keys may stand for; a single one for any."""
    hosts, ports = args.online_dataserver_ips, args.online_dataserver_ports
    counts = {1 if isinstance(hosts, str) else len(hosts), 1 if isinstance(ports, int) else len(ports)}
    return counts if len(counts) == 1 else counts - {1} if len(counts - {1}) == 1 else set()


def _needs_groups(args: ResolvedArgs) -> bool:
    return writes_pairs(args) or args.rl_loss_type != "reinforce" or args.reinforce_leave_one_out
