"""Training on answers that the model writes: reinforcement learning, and the parts that online DPO shares."""

from collections.abc import Iterator, Sequence

from megatron.callbacks import Callback
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_keys, rollout_servers
from megatron.methods.reinforcement.objective import PolicySettings, reinforcement
from megatron.methods.reinforcement.rollouts import Rollouts
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import loss_temperature
from megatron.objectives import Objective
from megatron.training import method
from megatron.training.method import Load, MethodRun, StepData
from megatron.training.metrics.loggers import log_directory


class OnlineMethod(method.Method):
    """Base class of methods whose training samples are written by the model during the run."""

    def __init__(self) -> None:
        self.rollouts: Rollouts | None = None

    def begin(self, run: MethodRun) -> None:
        """Prepares prompts, reward functions and samplers. Called before the first step."""
        self.rollouts = Rollouts(run, log_directory(run.args), run.run_id)

    def callbacks(self, run: MethodRun) -> Sequence[Callback]:
        """Returns the callback that records answers in `rollouts.jsonl` and adds metrics."""
        return [] if self.rollouts is None else [self.rollouts.record]

    def steps(self, run: MethodRun, load: Load) -> Iterator[StepData]:
        """Yields the micro-batches of each step, from answers sampled in generations. Rows are as long as the
        longest answer needs."""
        assert self.rollouts is not None
        return (StepData(batches, row_length=batches[0].tokens.shape[1]) for batches in self.rollouts)

    def exports_weights(self, args: NeoXArgs) -> bool:
        """Returns whether the run exports its weights between checkpoints: it does if servers write the
        answers."""
        return bool(rollout_servers(args))

    def close(self) -> None:
        """Ends the processes of reward functions and environments, and requests to servers."""
        if self.rollouts is not None:
            self.rollouts.close()


class Method(OnlineMethod):
    """Reinforcement learning: the model writes answers, and learns from the reward of each."""

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of reinforcement learning."""
        keys = ReinforcementKeys.read_from(args)
        settings = PolicySettings(
            keys.rl_epsilon, keys.rl_epsilon if keys.rl_epsilon_high is None else keys.rl_epsilon_high,
            keys.rl_importance_cap, keys.kl_div_beta, keys.kl_impl, keys.rl_kl_in_reward,
            keys.rl_kl_by_ratio, rollout_keys(args)["max_completion_length"],
        )  # fmt: skip
        return reinforcement(keys.rl_loss_type, settings, loss_temperature(args), args.softmax_rows)
