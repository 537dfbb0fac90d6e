"""The keys of training on answers that the model writes: prompts, rewards, losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import REQUIRED, key, new_key
from megatron.neox_arguments.keys.losses import Loss
from megatron.neox_arguments.methods import MethodKeys

REWARD_OPTIONS = (  # also of preference training on pairs that the model writes
    "rollout", "reward_functions", "reward_model", "reward_weights", "reward_timeout_s", "reward_workers",
    "reward_variables",
)  # fmt: skip
_CLIPPED = ("rl_epsilon", "rl_epsilon_high")
# Of an answer with a reward: `objective.PolicyLoss`.
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
    """The sub-keys of `rollout`, by TRL's names where it has them."""

    prompts: tuple[str, ...] = key(
        REQUIRED,
        'Files of prompts, one per line: {"prompt": text, or messages for the chat template, ...}; '
        "reward_functions get the other fields",
    )
    prompt_key: str = key("prompt", "Field of the prompt")
    chat: bool = key(False, "Treat texts as a user's words and apply the chat template; false: use them as they are")
    num_generations: int = key(
        8, "Answers per prompt; train_batch_size counts answers; with train_impl dpo it counts prompts", ge=1
    )
    judge: str | None = key(
        None,
        "train_impl dpo, instead of rewards: FILE.py:NAME of judge(prompts, completions), a function of pairs of "
        "texts. For each pair it returns 0 (the first is better), 1, or -1 or None (neither)",
    )
    missing_eos_penalty: float | None = key(
        None, "Subtracted from the reward of an unfinished answer; unset: nothing", gt=0
    )
    max_completion_length: int = key(256, "Most tokens of an answer; the row of seq_length also ends it", ge=1)
    max_prompt_length: int | None = key(
        None, "Most tokens of a prompt; a longer one loses its beginning. Unset: it is refused", ge=1
    )
    temperature: float = key(
        1.0,
        "Divides the logits in sampling, and in the losses of train_impl reinforce; 0: the likeliest tokens, "
        "with 1 in the loss",
        ge=0,
    )
    steps_per_generation: int = key(1, "Optimizer steps per generation of answers, train_batch_size each", ge=1)
    num_iterations: int = key(1, "Passes over the answers of a generation", ge=1)
    exact: bool = key(
        False,
        "Sample by the training forward pass, a whole row per token: log-probabilities agree bit for bit, but slowly",
    )
    logprob_bound: float = key(
        0.1,
        "End the run if log-probabilities of sampler and trainer differ by more than this, averaged over a "
        "step's tokens; 0: never. train_impl dpo checks the first step of a generation",
        ge=0,
    )
    servers: tuple[str, ...] | None = key(
        None,
        "Addresses (http://HOST:PORT) of servers to write the answers. They get new weights before each "
        "generation; each data rank uses one; NEOX_SERVE_TOKEN is sent. Unset: the training processes write",
    )
    server_api: Literal["openai", "vllm", "sglang"] = key(
        "openai",
        "API of the servers. openai: tools/serve.py (serve_weight_updates: true); vllm: vLLM's, with "
        "VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs; sglang: SGLang's",
    )
    server_timeout_s: float = key(
        600.0,
        "Seconds a server has for an answer or for new weights, and to become reachable",
        gt=0,
    )
    sync: str | None = key(
        None,
        "Folder for the servers' weights in HuggingFace's format, at the same path on the servers. Each "
        "generation writes RUN_ID/NUMBER; the last ones stay. Unset: rollout_weights in save",
    )
    staleness: int = key(
        0,
        "servers: request answers this many generations ahead while training goes on, so they come from weights "
        "this much older. rl_importance_cap corrects the difference; logprob_bound includes it",
        ge=0,
    )
    environment: str | None = key(
        None,
        "FILE.py:CLASS. Its instances answer the model turn by turn, by reset(prompt, seed, **columns) and "
        "step(completion). Their words are not trained; their reward counts",
    )
    environment_workers: int = key(16, "environment: parallel calls of reset and step", ge=1)
    max_turns: int = key(8, "environment: most turns of the model per conversation", ge=1)
    shuffle: bool = key(True, "Shuffle the prompts anew in each pass; false: keep their order")


@dataclass(frozen=True)
class ReinforcementKeys(MethodKeys):
    """Reinforcement learning and online preferences: answers that the model writes, and their rewards."""

    rollout: Mapping[str, Any] | None = new_key(
        None, "dataset_impl online: the prompts, and how the model answers them during training", section=Rollout
    )
    rl_loss_type: PolicyLoss = new_key(
        "reinforce",
        "Loss of answers with rewards. reinforce: GPT-NeoX's, log-probability times advantage, a mean over "
        "tokens. rloo: clipped ratios of whole answers against the other answers' mean (TRL's RLOO). The others "
        "take advantages against the prompt's mean. grpo, dapo, dr_grpo: clipped token ratios (mean of answer "
        "means; mean over tokens; sum over max_completion_length). gspo: grpo with an answer's mean ratio. "
        "cispo: dapo with truncated ratios as weights",
    )
    rl_epsilon: float = new_key(
        0.2, "Lower clip: with a negative advantage, a ratio below 1 minus this gives no gradient", gt=0
    )
    rl_epsilon_high: float | None = new_key(
        None,
        "Upper clip: with a positive advantage, a ratio above 1 plus this gives no gradient; unset: rl_epsilon; "
        "DAPO's: 0.28. cispo: the largest ratio itself; required",
        gt=0,
    )
    rl_scale_rewards: Literal["group", "batch", "none"] = new_key(
        "group",
        "Divisor of advantages: standard deviation of the prompt's rewards, of the batch's rewards, or none (Dr. GRPO)",
    )
    rl_importance_cap: float | None = new_key(
        None,
        "Weigh tokens by the trainer's probability over the sampler's, at most this (truncated importance "
        "sampling); 2 is common. Unset: no weights",
        gt=0,
    )
    rl_kl_in_reward: bool = new_key(
        False,
        "Subtract kl_div_beta times an answer's summed KL from its reward, as TRL's RLOO; false: add it to the loss",
    )
    rl_kl_by_ratio: bool = new_key(
        False,
        "Multiply a token's KL by its ratio, giving k3 the gradient of KL(model || reference), as DeepSeek-V3.2 "
        "and by default TRL's GRPO (use_bias_correction_kl)",
    )
    rl_mask_truncated: bool = new_key(
        False, "Do not train unfinished answers; their rewards still count in the means of advantages"
    )
    rl_overlong_buffer: int | None = new_key(
        None,
        "Lower the reward by up to 1 over this many last tokens of max_completion_length (DAPO's soft overlong "
        "punishment); unset: length costs nothing",
        ge=1,
    )
    reward_functions: tuple[str, ...] | None = new_key(
        None,
        "dataset_impl online: judges of answers, in separate processes: FILE.py:NAME of a function with TRL's "
        "signature, or exact_match, arithmetic, expression, json, code",
    )
    reward_model: str | None = new_key(
        None,
        "dataset_impl online: a reward model with the same tokenizer as a further judge, loaded beside the "
        "model; a checkpoint of train_impl: rm, or a HuggingFace folder",
    )
    reward_weights: tuple[float, ...] | None = new_key(
        None, "Weight of each of reward_functions, and of reward_model and rollout.environment after them; unset: 1"
    )
    reward_timeout_s: float = new_key(
        60.0,
        "Time limit in seconds; slower judges give no reward. It holds for all answers of a step with "
        "reward_functions or rollout.judge, for one answer with built-in functions, and for one call of "
        "rollout.environment",
        gt=0,
    )
    reward_workers: int = new_key(1, "Processes to share reward_functions", ge=1)
    reward_variables: tuple[str, ...] | None = new_key(
        None,
        "Environment variables passed to reward_functions, rollout.judge and rollout.environment, as "
        "OPENAI_API_KEY, beside PATH, HOME and others without secrets",
    )
    fp32_reinforce: bool = key(
        True, "REINFORCE: losses in fp32", no_effect="log-probabilities and losses are always computed in fp32"
    )
    kl_impl: Literal["abs", "mse", "kl", "full", "k3"] = key(
        "mse",
        "train_impl reinforce: KL from the reference, with d = log p - log p_reference of a token. kl: d (k1); "
        "mse: d^2 / 2 (k2); abs: |d|; k3: exp(-d) + d - 1 (GRPO's); full: KL(model || reference) of whole "
        "distributions",
    )
    kl_div_beta: float = key(
        0.1,
        "train_impl reinforce: weight of this KL; 0: no reference needed",
        ge=0,
        differs="GPT-NeoX divides losses by the rows of a micro-batch once more",
    )
    reinforce_leave_one_out: bool = key(
        False,
        "rl_loss_type reinforce: advantages against the mean of the prompt's other answers; false: against the "
        "mean of the last 100 rewards",
    )
    serve_model_weights: bool = key(
        False,
        "rollout.servers fetch the weights from rank 0 over HTTP, checked by SHA-256, and need no access to "
        "rollout.sync",
        differs="GPT-NeoX sends pickles over a socket to any client",
    )
    weight_server_port: int | tuple[int, ...] = key(
        6000,
        "serve_model_weights: the port of rank 0; 0: any",
        unread="programs fetching weights must change in any case",
    )
    online_dataserver_ips: str | tuple[str, ...] = key(
        "localhost",
        "dataset_impl online: hosts of servers that write the answers, used only if rollout.servers is unset, and "
        "this or online_dataserver_ports is set",
        differs="GPT-NeoX reads finished samples from them",
    )
    online_dataserver_ports: int | tuple[int, ...] = key(10000, "Ports of these hosts: one for all, or one each")


def rollout_keys(args: object) -> Mapping[str, Any]:
    """Returns the sub-keys of `rollout` of a run that has them."""
    rollout = ReinforcementKeys.read_from(args).rollout
    assert rollout is not None
    return rollout


def dataservers(args: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the hosts and the ports of GPT-NeoX's keys for servers."""
    keys = ReinforcementKeys.read_from(args)
    hosts, ports = keys.online_dataserver_ips, keys.online_dataserver_ports
    return (hosts,) if isinstance(hosts, str) else hosts, (ports,) if isinstance(ports, int) else ports


def rollout_servers(args: Any) -> tuple[str, ...]:
    """Returns the URLs of the servers that write the answers, without a trailing slash; an empty tuple if the
    training processes do.

    The URLs come from `rollout.servers`, else from GPT-NeoX's keys if one of them is set.
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
