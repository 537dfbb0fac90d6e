"""Orders the forward and backward passes of a step over pipeline ranks (`pipeline_schedule`)."""

from types import SimpleNamespace
from typing import Literal, NamedTuple

from megatron.model.pipeline_partition import StagePlacement
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.methods import declaration_of


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    stage: its number in the model. With virtual stages a rank holds several (`StagePlacement`).
    """

    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int


def action_tables(args: ModelArgs, placement: StagePlacement, micro_batches: int) -> list[list[Action]]:
    """Returns the actions of each pipeline rank in a step of `micro_batches`, in order.

    Raises ConfigError if the schedule does not support this number of micro-batches.
    """
    if (problem := _problem(args, placement.ranks, micro_batches)) is not None:
        raise args.error("pipeline_schedule", problem)
    if placement.chunks == 1:
        return [one_forward_one_backward(rank, placement.ranks, micro_batches) for rank in range(placement.ranks)]
    return _interleaved(placement, micro_batches)


def schedule_problems(args: NeoXArgs) -> list[str]:
    """Returns an error line if the configured schedule does not support the number of micro-batches of a
    step."""
    if args.gradient_accumulation_steps is None:
        return []
    micro_batches = args.gradient_accumulation_steps * declaration_of(args).sets_per_step(args)
    problem = _problem(args, args.pp, micro_batches)
    return [] if problem is None else [f"{args.origin('pipeline_schedule')}: pipeline_schedule: {problem}"]


def _problem(args: ModelArgs, ranks: int, micro_batches: int) -> str | None:
    if args.stages_per_rank == 1 or micro_batches % (rounds := max(1, micro_batches // ranks)) == 0:
        return None
    fitting = [n for n in range(micro_batches, 0, -1) if n % max(1, n // ranks) == 0][0]
    return (
        f"{args.pipeline_schedule} runs {micro_batches} micro-batches a step on {ranks} pipeline ranks in {rounds} "
        f"rounds, which must be equally long; set gradient_accumulation_steps to {fitting}, or to a multiple of {ranks}"
    )


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


def _interleaved(placement: StagePlacement, micro_batches: int) -> list[list[Action]]:
    """Returns torch's table of interleaved 1F1B (arXiv 2104.04473) for each rank.

    Ranks run their stages in turns, each for as many micro-batches as there are ranks.
    """
    from torch.distributed.pipelining import ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import _ComputationType as Computation

    # Its constructor wants torch's own stages; the table needs these numbers only.
    sizes = SimpleNamespace(
        pp_group_size=placement.ranks,
        n_local_stages=placement.chunks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // placement.ranks),
    )
    kinds: dict[Computation, Literal["forward", "backward"]]
    kinds = {Computation.FORWARD: "forward", Computation.FULL_BACKWARD: "backward"}
    tables = []
    for rank in range(placement.ranks):
        table = ScheduleInterleaved1F1B._calculate_single_rank_operations(sizes, rank)  # type: ignore[arg-type]
        tables.append([Action(kinds[a.computation_type], a.stage_index, a.microbatch_index) for a in table if a])
    return tables
