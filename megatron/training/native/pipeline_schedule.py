"""Orders the forward and backward passes of a step over pipeline ranks (`pipeline_schedule`)."""

from typing import NamedTuple

from megatron.model.pipeline_partition import StagePlacement
from megatron.mpu.torch_versions import PassKind, torch_pipeline_tables
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    kind: zero-bubble schedules divide a backward. "backward_input" computes the gradients of hidden states,
        for which other ranks wait, and "backward_weight" those of weights, later.
    stage: its number in the model. With virtual stages a rank holds several (`StagePlacement`).
    """

    kind: PassKind
    stage: int
    micro_batch: int


def action_tables(args: NeoXArgs, placement: StagePlacement, micro_batches: int) -> list[list[Action]]:
    """Returns the actions of each pipeline rank in a step of `micro_batches`, in order.

    Raises ConfigError if the schedule does not support this number of micro-batches.
    """
    if (problem := _problem(args, placement.ranks, micro_batches)) is not None:
        raise args.error("pipeline_schedule", problem)
    if placement.ranks == 1 or args.pipeline_schedule == "1f1b":
        return [one_forward_one_backward(rank, placement.ranks, micro_batches) for rank in range(placement.ranks)]
    tables = torch_pipeline_tables(args.pipeline_schedule, placement.ranks, placement.chunks, micro_batches)
    return [[Action(*action) for action in table] for table in tables]


def micro_batches_of(args: NeoXArgs) -> int | None:
    """Returns the number of micro-batches of a step on each data rank; None if it is not known yet."""
    steps = args.gradient_accumulation_steps
    return None if steps is None else steps * declaration_of(args).sets_per_step(args)


def schedule_problems(args: NeoXArgs) -> list[str]:
    """Returns an error line if the configured schedule does not support the number of micro-batches of a
    step."""
    micro_batches = micro_batches_of(args)
    problem = None if micro_batches is None else _problem(args, args.pp, micro_batches)
    return [] if problem is None else [f"{args.origin('pipeline_schedule')}: pipeline_schedule: {problem}"]


def _problem(args: NeoXArgs, ranks: int, micro_batches: int) -> str | None:
    if _supports(args.pipeline_schedule, ranks, micro_batches):
        return None
    sets = declaration_of(args).sets_per_step(args)
    candidates = sorted(range(1, micro_batches + 2 * ranks + 1), key=lambda steps: abs(steps * sets - micro_batches))
    steps = next(steps for steps in candidates if _supports(args.pipeline_schedule, ranks, steps * sets))
    need = f"{2 * ranks} or more" if args.pipeline_schedule == "dualpipev" else f"a multiple of {ranks}"
    return (
        f"{args.pipeline_schedule} cannot divide {micro_batches} micro-batches a step over {ranks} pipeline ranks; "
        f"they need {need}, so set gradient_accumulation_steps to {steps}"
    )


def _supports(schedule: str, ranks: int, micro_batches: int) -> bool:
    """Returns whether torch has a table for this number of micro-batches.

    Schedules in which ranks take turns over their stages need turns of equal length.
    """
    if ranks == 1 or schedule in ("1f1b", "zbv"):
        return True
    if schedule == "dualpipev":
        return micro_batches >= 2 * ranks
    return micro_batches % max(1, micro_batches // ranks) == 0


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Returns the actions of a stage in the order of 1F1B (arXiv 2006.09503, PipeDream-Flush).

    A stage first runs one forward for each later stage. Then it runs a forward and a backward in turns, and
    at last the remaining backwards. With one stage each micro-batch is finished before the next begins.
    """
    # torch's Schedule1F1B needs as many micro-batches as stages.
    forwards = [Action("forward", stage, i) for i in range(micro_batches)]
    backwards = [Action("backward", stage, i) for i in range(micro_batches)]
    warm_up = min(stages - 1 - stage, micro_batches)
    turns = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *turns, *backwards[micro_batches - warm_up :]]
