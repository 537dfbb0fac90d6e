"""Declares the configuration keys of training on answers that the model writes: prompts, rewards and
losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import REQUIRED, key, new_key
from megatron.neox_arguments.keys.losses import Loss
from megatron.neox_arguments.methods import MethodKeys

REWARD_OPTIONS = (  # keys that online DPO reads too
    "rollout", "reward_functions", "reward_model", "reward_weights", "reward_timeout_s", "reward_workers",
    "reward_variables",
)  # fmt: skip
_CLIPPED = ("rl_epsilon", "rl_epsilon_high")
# The functions are of type `objective.PolicyLoss`.
LOSSES = {
    "reinforce": Loss("methods.reinforcement.objective.policy_gradient", ("reinforce_leave_one_out",)),
    "rloo": Loss("methods.reinforcement.objective.clipped_sequences", _CLIPPED),
    "grpo": Loss("methods.reinforcement.objective.clipped", (*_CLIPPED, "rl_scale_rewards")),
    "dapo": Loss("methods.reinforcement.objective.clipped", (*_CLIPPED, "rl_scale_rewards")),
    "dr_grpo": Loss("methods.reinforcement.objective.clipped", (*_CLIPPED, "rl_scale_rewards")),
    "gspo": Loss("methods.reinforcement.objective.clipped_means", (*_CLIPPED, "rl_scale_rewards")),
    "cispo": Loss("methods.reinforcement.objective.truncated_weights", (*_CLIPPED, "rl_scale_rewards")),
}
PolicyLoss: TypeAlias = Literal[tuple(LOSSES)]  # type: ignore[valid-type]
DATASERVER_KEYS = ("online_dataserver_ips", "online_dataserver_ports")


@dataclass(frozen=True)
class Rollout:
    """The sub-keys of `rollout`, with TRL's names where it has them."""

    prompts: tuple[str, ...] = key(
        REQUIRED,
        'JSONL files of prompts. A line is {"prompt": P, ...}, with P a text, or a list of messages for the chat '
        "template; reward_functions get the other fields of the line",
    )
    prompt_key: str = key("prompt", "Name of the field that holds the prompt in a line of rollout.prompts")
    chat: bool = key(
        False,
        "Turn prompts that are texts into a user message and apply the chat template; false: use them as plain text",
    )
    num_generations: int = key(
        8,
        "Number of answers to sample per prompt. train_batch_size counts answers; with train_impl: dpo it counts "
        "prompts",
        ge=1,
    )
    judge: str | None = key(
        None,
        "For train_impl: dpo in place of rewards, FILE.py:NAME of a function judge(prompts, completions) of pairs of "
        "texts. It returns for each pair 0 (the first is better), 1 (the second), or -1 or None (no verdict)",
    )
    missing_eos_penalty: float | None = key(
        None, "Penalty that is subtracted from the reward of a truncated answer; unset: none", gt=0
    )
    max_completion_length: int = key(
        256, "Maximum tokens of an answer; it also ends where prompt and answer fill seq_length", ge=1
    )
    max_prompt_length: int | None = key(
        None,
        "Maximum tokens of a prompt; a longer prompt is truncated at its beginning. Unset: a prompt without room for "
        "an answer in seq_length is an error",
        ge=1,
    )
    temperature: float = key(
        1.0,
        "Temperature of sampling, which divides the logits; train_impl: reinforce uses it in the loss too. 0: greedy "
        "sampling, and temperature 1 in the loss",
        ge=0,
    )
    steps_per_generation: int = key(
        1,
        "Number of optimizer steps, of train_batch_size each, for which answers are sampled at once (a generation)",
        ge=1,
    )
    num_iterations: int = key(1, "How often the answers of a generation are trained on", ge=1)
    exact: bool = key(
        False,
        "Sample with the training forward pass over full rows, one pass per token, in place of the generation engine. "
        "This is slow, but log-probabilities of sampling and training are then bit-identical",
    )
    logprob_bound: float = key(
        0.1,
        "End the run if the log-probabilities that sampler and trainer give to a step's tokens differ by more than "
        "this on average; 0: never. With train_impl: dpo only the first step of a generation is checked",
        ge=0,
    )
    servers: tuple[str, ...] | None = key(
        None,
        "Addresses (http://HOST:PORT) of inference servers that write the answers. They get new weights before each "
        "generation. Each data rank uses one server. The token in NEOX_SERVE_TOKEN is sent. Unset: the training "
        "processes write the answers",
    )
    server_api: Literal["openai", "vllm", "sglang"] = key(
        "openai",
        "Program that rollout.servers run. openai: tools/serve.py (with serve_weight_updates: true); vllm: vLLM, with "
        "VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs; sglang: SGLang",
    )
    server_timeout_s: float = key(
        600.0,
        "Seconds that one of rollout.servers may take to become reachable, to write an answer, or to load new weights",
        gt=0,
    )
    sync: str | None = key(
        None,
        "Folder for the weights that rollout.servers load, in HuggingFace's format. The servers must see it at the "
        "same path. Each generation writes RUN_ID/NUMBER, and old ones are deleted. Unset: the folder rollout_weights "
        "in save",
    )
    staleness: int = key(
        0,
        "With rollout.servers, request answers this many generations ahead, while training goes on. They then come "
        "from weights that are this many generations old. rl_importance_cap corrects for this; logprob_bound measures "
        "it too",
        ge=0,
    )
    environment: str | None = key(
        None,
        "FILE.py:CLASS of an environment that converses with the model. It has the methods reset(prompt, seed, "
        "**columns) and step(completion). Its text is not trained; its reward counts",
    )
    environment_workers: int = key(
        16, "Maximum number of parallel calls of reset and step of rollout.environment", ge=1
    )
    max_turns: int = key(
        8, "With rollout.environment, the maximum number of texts that the model writes per conversation", ge=1
    )
    shuffle: bool = key(
        True, "Shuffle the prompts differently in each pass over rollout.prompts; false: keep the order of the files"
    )


@dataclass(frozen=True)
class ReinforcementKeys(MethodKeys):
    """Reinforcement learning and online preferences: answers that the model writes, and their rewards."""

    rollout: Mapping[str, Any] | None = new_key(
        None,
        "For dataset_impl: online, a mapping with the prompts and how the model answers them during training",
        section=Rollout,
    )
    rl_loss_type: PolicyLoss = new_key(
        "reinforce",
        "Loss of answers with rewards. REINFORCE as in GPT-NeoX: reinforce, the mean over tokens of log-probability "
        "times advantage. RLOO as in TRL: rloo, with clipped ratios of full answers, and the mean of a prompt's other "
        "answers as baseline. All others subtract the mean of a prompt's answers. Clipped token ratios: grpo (mean of "
        "answer means), dapo (mean over tokens), dr_grpo (sum divided by max_completion_length). One clipped ratio per "
        "answer, the mean of its tokens': gspo. REINFORCE weighted by truncated ratios: cispo",
    )
    rl_epsilon: float = new_key(
        0.2,
        "Lower clipping bound of the ratio p_new / p_old: with a negative advantage, ratios below 1 - rl_epsilon give "
        "no gradient",
        gt=0,
    )
    rl_epsilon_high: float | None = new_key(
        None,
        "Upper clipping bound of the ratio p_new / p_old: with a positive advantage, ratios above 1 + rl_epsilon_high "
        "give no gradient. Unset: rl_epsilon. DAPO uses 0.28. With rl_loss_type: cispo it is required, and is the "
        "largest ratio itself",
        gt=0,
    )
    rl_scale_rewards: Literal["group", "batch", "none"] = new_key(
        "group",
        "Divide advantages by a standard deviation. group: of the rewards of the prompt's answers; batch: of all "
        "rewards of the generation; none: do not divide (Dr. GRPO)",
    )
    rl_importance_cap: float | None = new_key(
        None,
        "Multiply each token's loss by p_trainer / p_sampler, truncated to at most this value (truncated importance "
        "sampling); 2 is common. Unset: no such weights",
        gt=0,
    )
    rl_kl_in_reward: bool = new_key(
        False,
        "Subtract kl_div_beta times the sum of an answer's KL from its reward, as TRL's RLOO does; false: add the KL "
        "to the loss",
    )
    rl_kl_by_ratio: bool = new_key(
        False,
        "Multiply each token's KL by its ratio p_new / p_old. The gradient of kl_impl: k3 is then that of KL(model || "
        "reference), as in DeepSeek-V3.2 and by default in TRL's GRPO (use_bias_correction_kl)",
    )
    rl_mask_truncated: bool = new_key(
        False, "Do not train truncated answers; their rewards still count in the baselines of other answers"
    )
    rl_overlong_buffer: int | None = new_key(
        None,
        "Penalise long answers: over the last rl_overlong_buffer tokens before max_completion_length the penalty on "
        "the reward rises from 0 to 1 (DAPO's soft overlong punishment). Unset: no penalty",
        ge=1,
    )
    reward_functions: tuple[str, ...] | None = new_key(
        None,
        "For dataset_impl: online, a list of functions that give rewards to answers. An entry is FILE.py:NAME of a "
        "function with TRL's signature, or a built-in one: exact_match, arithmetic, expression, json or code",
    )
    reward_model: str | None = new_key(
        None,
        "For dataset_impl: online, a reward model whose score is added to the rewards, loaded beside the trained "
        "model: a checkpoint of train_impl: rm, or a HuggingFace folder, with the same tokenizer",
    )
    reward_weights: tuple[float, ...] | None = new_key(
        None,
        "Weights of the parts of the reward, in this order: each of reward_functions, then reward_model, then "
        "rollout.environment, as far as they are set; unset: 1 each",
    )
    reward_timeout_s: float = new_key(
        60.0,
        "Time limit in seconds, after which an answer gets no reward. It limits a call of a function in "
        "reward_functions or rollout.judge with all answers of a generation, a built-in function per answer, and each "
        "call of rollout.environment",
        gt=0,
    )
    reward_workers: int = new_key(1, "Number of processes among which reward_functions are distributed", ge=1)
    reward_variables: tuple[str, ...] | None = new_key(
        None,
        "Names of environment variables to pass to reward_functions, rollout.judge and rollout.environment, such as "
        "OPENAI_API_KEY. PATH, HOME and some others without secrets are always passed",
    )
    fp32_reinforce: bool = key(
        True,
        "REINFORCE: compute losses in fp32",
        no_effect="log-probabilities and losses are always computed in fp32",
    )
    kl_impl: Literal["abs", "mse", "kl", "full", "k3"] = key(
        "mse",
        "For train_impl: reinforce, how the KL from the reference model is estimated. A token has d = log p - "
        "log p_reference. kl: d (k1). mse: d^2 / 2 (k2). abs: |d|. k3: exp(-d) + d - 1 (GRPO). full: the exact "
        "KL(model || reference) over the vocabulary",
    )
    kl_div_beta: float = key(
        0.1,
        "For train_impl: reinforce, the weight of the KL from the reference model (kl_impl); 0: no reference model is "
        "needed",
        ge=0,
        differs="GPT-NeoX divides losses once more by the number of rows of a micro-batch",
    )
    reinforce_leave_one_out: bool = key(
        False,
        "For rl_loss_type: reinforce, the baseline that is subtracted from a reward: the mean reward of the prompt's "
        "other answers; false: the mean of the last 100 rewards",
    )
    serve_model_weights: bool = key(
        False,
        "Let rollout.servers fetch new weights from rank 0 over HTTP, checked by SHA-256, so that they need no access "
        "to the folder rollout.sync",
        differs="GPT-NeoX sends pickles over a socket to any client",
    )
    weight_server_port: int | tuple[int, ...] = key(
        6000,
        "For serve_model_weights, the port on which rank 0 serves the weights; 0: any free port",
        unread="programs fetching weights must change in any case",
    )
    online_dataserver_ips: str | tuple[str, ...] = key(
        "localhost",
        "For dataset_impl: online, the hosts of servers that write the answers; GPT-NeoX's form of rollout.servers. "
        "Used only if rollout.servers is unset and this or online_dataserver_ports is set",
        differs="GPT-NeoX reads finished samples from these servers",
    )
    online_dataserver_ports: int | tuple[int, ...] = key(
        10000, "Ports of the servers in online_dataserver_ips: one for all hosts, or one for each"
    )


def rollout_keys(args: object) -> Mapping[str, Any]:
    """Returns the sub-keys of `rollout`. The run must have that key."""
    rollout = ReinforcementKeys.read_from(args).rollout
    assert rollout is not None
    return rollout


def dataservers(args: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns hosts and ports of the answer servers from GPT-NeoX's keys `online_dataserver_ips` and
    `_ports`."""
    keys = ReinforcementKeys.read_from(args)
    hosts, ports = keys.online_dataserver_ips, keys.online_dataserver_ports
    return (hosts,) if isinstance(hosts, str) else hosts, (ports,) if isinstance(ports, int) else ports


def rollout_servers(args: Any) -> tuple[str, ...]:
    """Returns the URLs of the servers that write the answers, without a trailing slash.

    They come from `rollout.servers`, else from GPT-NeoX's keys if one of these is set. Empty if the training
    processes write the answers.
    """
    keys = ReinforcementKeys.read_from(args)
    if keys.rollout is None:
        return ()
    if keys.rollout["servers"] is not None:
        return tuple(address.rstrip("/") for address in keys.rollout["servers"])
    if all(args.user_values.get(key) is None for key in DATASERVER_KEYS):
        return ()
    hosts, ports = dataservers(args)
    count = max(len(hosts), len(ports))
    hosts = tuple(f"[{host}]" if ":" in host else host for host in hosts)
    pairs = zip(hosts * (count if len(hosts) == 1 else 1), ports * (count if len(ports) == 1 else 1), strict=False)
    return tuple(f"http://{host}:{port}" for host, port in pairs)
