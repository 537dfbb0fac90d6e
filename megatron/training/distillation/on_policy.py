"""Which steps learn from the teacher on texts that the student writes itself (GKD, arXiv 2306.13649)."""

from collections.abc import Callable, Iterator

from megatron.data import Batch
from megatron.mpu import mix_seed
from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint.progress import TrainingProgress

Answer = Callable[[list[Batch]], list[Batch]]
"""From the micro-batches of a step to the same with their trained tokens written by the model as it is."""


def is_on_policy(args: NeoXArgs, iteration: int) -> bool:
    """Whether the step after `iteration` is: a share `distillation.lmbda` of them, by the seed and the
    iteration alone, so that a run that goes on takes the same."""
    assert args.distillation is not None
    return mix_seed(args.seed, "on_policy", iteration) / 2**63 < args.distillation["lmbda"]


def on_policy_steps(
    args: NeoXArgs, progress: TrainingProgress, steps: Iterator[list[Batch]], answer: Answer
) -> Iterator[list[Batch]]:
    """The steps still to do; in those on policy the student answers the prompts of the step. All ranks call
    it together."""
    while True:
        if is_on_policy(args, progress.iteration):
            yield answer(next(steps))
        else:
            yield next(steps)
